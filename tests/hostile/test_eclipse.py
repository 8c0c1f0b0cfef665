"""Strangers run all the DHT nodes that are nearest to the run's keys, and forget everything that is stored there."""

from __future__ import annotations

import pytest

from peers.protocol.records import COORDINATOR_KEY, PEERS_KEY
from tests.support.eclipse import eclipse
from tests.support.swarm import LightSwarm, wait_until

RUN_ID = "eclipsed"


@pytest.fixture
def hidden(quiet_bootstrap, tmp_path):
    with eclipse(tmp_path, [quiet_bootstrap], PEERS_KEY(RUN_ID), COORDINATOR_KEY(RUN_ID)) as stores:
        yield stores


@pytest.fixture
def light(quiet_bootstrap, tmp_path):
    with LightSwarm(tmp_path, [quiet_bootstrap], RUN_ID, step_s=0.02, max_steps=10**9) as light:
        yield light


@pytest.mark.exhaustive
def test_founders_and_newcomers_find_each_other_through_any_initial_peer(hidden, light):
    founders = light.start_all(2)
    wait_until(lambda: all(peer.epoch >= 2 for peer in founders), "epochs of both founders")
    assert founders[0].epochs[-1]["contributors"] == [0, 1]
    assert sum(store.num_forgotten for store in hidden) > 10
    # The newcomer does not know the bootstrap node, only a peer.
    light.initial_peers = [founders[1].address]
    newcomer = light.start(2)
    wait_until(
        lambda: newcomer.epochs and newcomer.epochs[-1]["contributors"] == [0, 1, 2], "an epoch of all three"
    )
    light.check_digests()
