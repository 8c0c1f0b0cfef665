"""A run whose coordinator is killed, which is also its bootstrap node and assigns the ranks; real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.coordinator import Coordinator
from tests.support.swarm import LightPeer, LightSwarm, wait_until

RUN = "coordinatorloss"


class CoordinatedSwarm(LightSwarm):
    """A swarm in which no peer is given a rank; `start` only numbers directories."""

    def config_of(self, rank: int, directory: Path, worker: dict[str, Any]) -> dict[str, Any]:
        return super().config_of(rank, directory, worker) | {"world_rank": None}


@pytest.fixture
def light(coordinator: Coordinator, tmp_path: Path) -> Iterator[LightSwarm]:
    # With 4 MB a peer, rounds last long enough to be hit.
    worker = {"numel": 1_000_000, "local_steps": 4, "max_steps": 10**6, "step_s": 0.1}
    made = CoordinatedSwarm(tmp_path, [coordinator.start()], RUN, **worker)
    made.extra = {"galaxy_size": 3}
    yield made
    made.close()


def ranks_of(light: LightSwarm) -> dict[int, int]:
    return {name: peer.records("start")[-1]["world_rank"] for name, peer in light.peers.items()}


def kill_in_mid_round(coordinator: Coordinator, peer: LightPeer) -> None:
    attempts = peer.log.count("reducing with")
    wait_until(lambda: peer.log.count("reducing with") > attempts, "the next reduction")
    coordinator.kill()


def has_trained_with(peer: LightPeer, num_peers: int) -> bool:
    return any(len(record["contributors"]) == num_peers for record in peer.epochs)


def test_a_coordinator_killed_in_mid_round_comes_back_to_the_same_ranks_and_costs_no_epoch(
    light, coordinator
):
    for name in range(3):
        light.start(name)
    wait_until(lambda: all(peer.epoch >= 1 for peer in light.peers.values()), "epoch 1")
    ranks = ranks_of(light)
    assert sorted(ranks.values()) == [0, 1, 2]
    kill_in_mid_round(coordinator, light.peers[0])
    epoch = light.peers[0].epoch
    wait_until(lambda: light.peers[0].epoch >= epoch + 2, "epochs without the coordinator")
    assert light.initial_peers == [coordinator.start()]
    light.peers[2].kill()
    back = light.start(2)
    # If both started at once and did not hear from the coordinator, either could claim the free rank.
    wait_until(lambda: back.records("start")[1:], "its second start")
    light.start(3)
    wait_until(
        lambda: all(has_trained_with(peer, 4) for peer in light.peers.values()), "an epoch of all four"
    )
    assert ranks_of(light) == {**ranks, 3: 3}
    light.check_none_is_missed()


@pytest.mark.exhaustive
def test_without_its_coordinator_a_run_goes_on_and_grows_through_any_peer_and_no_rank_is_given_twice(
    light, coordinator
):
    for name in range(3):
        light.start(name)
    wait_until(lambda: all(peer.epoch >= 1 for peer in light.peers.values()), "epoch 1")
    kill_in_mid_round(coordinator, light.peers[1])
    epoch = light.peers[1].epoch
    wait_until(lambda: light.peers[1].epoch >= epoch + 2, "epochs without the coordinator")
    # A killed peer comes back by its own command, and two newcomers join at once through any peer.
    ranks = ranks_of(light)
    last = next(name for name, rank in ranks.items() if rank == 2)
    light.initial_peers = [*light.initial_peers, light.peers[0].address, light.peers[1].address]
    light.peers[last].kill()
    for name in (last, 3, 4):
        light.start(name)
    wait_until(
        lambda: all(has_trained_with(peer, 5) for peer in light.peers.values()), "an epoch of all five"
    )
    claimed = ranks_of(light)
    # A newcomer may have its old rank: epochs are short, and a peer that misses three is taken off the roster.
    assert sorted(claimed.values()) == [0, 1, 2, 3, 4]
    coordinator.start()
    light.start(5)
    wait_until(lambda: has_trained_with(light.peers[5], 6), "an epoch of all six")
    assert ranks_of(light) == {**claimed, 5: 5}
    light.check_none_is_missed()
