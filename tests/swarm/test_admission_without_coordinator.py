"""A closed swarm whose coordinator is gone for good still grows if one of its peers has the admission key."""

from __future__ import annotations

import shutil

import pytest

from tests.support.closed_swarm import closed_run
from tests.support.swarm import wait_until


@pytest.mark.exhaustive
def test_a_peer_with_the_admission_key_admits_a_newcomer_after_the_coordinator_has_gone(tmp_path):
    with closed_run(tmp_path / "state", "bereft") as run:
        light = run.swarm(tmp_path / "peers", local_steps=5, max_steps=10**9, step_s=0.04)
        key = tmp_path / "copied-key"
        shutil.copy(run.config.admission_key_path, key)
        light.galaxy_size = 2
        light.extra = {"admission_key_file": str(key)}
        first = light.start(0)
        light.extra = {"swarm_secret_file": run.secret_file}
        second = light.start(1)
        wait_until(lambda: first.epoch and second.epoch, "the first epoch")
    try:
        light.initial_peers = [second.address]
        newcomer = light.start(2)
        wait_until(lambda: newcomer.epochs, "an epoch of the newcomer")
        wait_until(lambda: first.epochs[-1]["contributors"] == [0, 1, 2], "a round of all three")
        light.check_digests()
    finally:
        light.close()
