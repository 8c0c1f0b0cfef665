"""A stranger in an open swarm claims to be a newer coordinator than the real one, and answers newcomers falsely."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from peers.protocol.admission import Taken
from peers.protocol.refusal import Refusal, Why
from tests.support.closed_swarm import Closed, closed_run
from tests.support.exhaustive import exhaustive_but
from tests.support.false_coordinator import Answer, FalseCoordinator
from tests.support.hostile import Hostile
from tests.support.swarm import LightPeer, LightSwarm, check_well, wait_until

RUN_ID = "falsecoordinator"
FOUNDERS = 2
JOINS_WITHIN_S = 90.0

ANSWERS: dict[str, Answer] = {
    "the rank is taken": Taken(holder="somebody"),
    "it is banned": Refusal(why=Why.BANNED),
    "garbage": b"\xc1" * 1000,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    with closed_run(tmp_path_factory.mktemp("coordinator"), RUN_ID, admission=False) as coordinated:
        yield coordinated


@pytest.fixture(scope="module")
def light(run: Closed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightSwarm]:
    """Two honest peers, which train throughout this file. No peer is given a rank; `start` only numbers directories."""
    directory = tmp_path_factory.mktemp("honest")
    with LightSwarm(directory, [run.address], RUN_ID, local_steps=5, max_steps=10**9, step_s=0.04) as light:
        light.extra = {"world_rank": None, "galaxy_size": FOUNDERS}
        light.begin(*range(FOUNDERS))
        # From now on the coordinator tells newcomers these settings.
        light.extra = {"world_rank": None, "galaxy_size": None}
        yield light


@pytest.mark.exhaustive
def test_a_newcomer_that_knows_the_coordinator_does_not_ask_another(light, tmp_path):
    with Hostile(tmp_path, light.initial_peers, RUN_ID) as hostile:
        liar = FalseCoordinator(hostile, None)
        hostile.call(liar.begin())
        wait_until(lambda: hostile.call(liar.is_the_newest()), "both records in the DHT")
        join_and_leave(light)
        assert not liar.asked


@pytest.mark.parametrize("answer", exhaustive_but(("garbage",), ANSWERS))
def test_a_newcomer_that_knows_only_a_member_goes_on_to_the_coordinator(light, tmp_path, answer):
    with Hostile(tmp_path, light.initial_peers, RUN_ID) as hostile:
        liar = FalseCoordinator(hostile, ANSWERS[answer])
        hostile.call(liar.begin())
        wait_until(lambda: hostile.call(liar.is_the_newest()), "both records in the DHT")
        join_and_leave(light, initial_peers=[light.peers[0].address])
        assert liar.asked


def join_and_leave(light: LightSwarm, **config: Any) -> None:
    """A newcomer gets a rank that no other peer has, trains and leaves; the others train throughout."""
    before = {name: peer.epoch for name, peer in light.peers.items()}
    ranks = {peer.records("start")[-1]["world_rank"] for peer in light.peers.values()}
    usual, light.extra = light.extra, {**light.extra, **config}
    newcomer = light.start(light.num_started)
    light.extra = usual
    try:
        wait_until(
            lambda: newcomer.epochs or not newcomer.process.is_alive(), "an epoch of it", JOINS_WITHIN_S
        )
        assert newcomer.epochs, newcomer.error
        assert newcomer.records("start")[-1]["world_rank"] not in ranks
        honest = [light.peers[name] for name in before]
        wait_until(lambda: all(peer.epoch >= before[peer.rank] + 2 for peer in honest), "two more epochs")
        light.check_digests()
        check_well(honest)
    finally:
        leave(light, newcomer)


def leave(light: LightSwarm, peer: LightPeer) -> None:
    peer.process.terminate()
    peer.process.join()
    del light.peers[peer.rank]
