"""A newcomer to a swarm that does not wait for it."""

from __future__ import annotations

import re
from functools import partial

import pytest

from tests.support.preparations import HOLDS, hold_state_until
from tests.support.swarm import wait_until


@pytest.mark.exhaustive
def test_a_newcomer_arrives_though_epochs_are_shorter_than_its_download(swarm, tmp_path):
    """The download takes longer than two epochs."""
    may_end = tmp_path / "may-end"
    light = swarm(numel=8_000_000, local_steps=2, max_steps=10**6, step_s=0.02)
    light.preparations = {rank: partial(hold_state_until, may_end) for rank in range(2)}
    first, _ = donors = light.start_all(2)
    wait_until(lambda: first.epoch >= 2, "epoch 2")
    light.galaxy_size = 3
    newcomer = light.start(2)
    wait_until(lambda: any(HOLDS in donor.log for donor in donors), "its download")
    since = first.epoch
    wait_until(lambda: first.epoch >= since + 2, "two more epochs")
    may_end.touch()
    started = wait_until(lambda: newcomer.records("start"), "its start")[0]
    wait_until(lambda: 2 in first.epochs[-1]["contributors"], "an epoch with its work")
    light.check_digests()
    # It repeats the commits that were made meanwhile, and does not download the whole state again.
    assert re.findall(r"made \d+ commits that have come", newcomer.log), newcomer.log
    assert started["epoch"] >= since
