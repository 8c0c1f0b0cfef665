"""Whoever comes to a swarm that does not wait for it."""

from __future__ import annotations

import re

import pytest

from tests.support.swarm import wait_until


@pytest.mark.exhaustive
def test_a_newcomer_arrives_though_epochs_are_shorter_than_its_download(swarm):
    # 64 MB of anchor and momentum; an epoch is a few steps and a round, about half a second.
    light = swarm(numel=8_000_000, local_steps=2, max_steps=10**6, step_s=0.02)
    first, _ = light.start_all(2)
    wait_until(lambda: first.epoch >= 2, "epoch 2")
    light.galaxy_size = 3
    newcomer = light.start(2)
    started = wait_until(lambda: newcomer.records("start"), "its start")[0]
    wait_until(lambda: 2 in first.epochs[-1]["contributors"], "an epoch with its work")
    light.check_digests()
    asked = len(re.findall(r"asking \d+ peers? for the state", newcomer.log))
    # Whoever has gone on says so, which costs a round trip: the next head is asked for then.
    refused = len(re.findall(r"no state of epoch \d+ yet: nobody hands over", newcomer.log))
    failed = re.findall(r"the state does not come from \w+: (?!it holds the state)", newcomer.log)
    made = re.findall(r"made (\d+) commits that have come", newcomer.log)
    # What has come since is made here, and not downloaded whole; one transfer may fail.
    assert asked - refused - len(made) <= (2 if made else 1) and len(failed) <= 1, newcomer.log
    assert started["epoch"] >= 2
