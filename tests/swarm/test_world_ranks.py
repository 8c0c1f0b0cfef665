"""A run without a coordinator: peers claim world ranks, and certificates assign them."""

from __future__ import annotations

import pytest

from tests.support.swarm import LightPeer, wait_until


def rank_of(peer: LightPeer, life: int = 1) -> int:
    start = wait_until(lambda: peer.records("start")[life - 1 :], "its first step")
    return int(start[0]["world_rank"])


def wait_for_all_four(peer: LightPeer) -> None:
    known = len(peer.epochs)

    def have_met() -> bool:
        return any(record["contributors"] == [0, 1, 2, 3] for record in peer.epochs[known:])

    wait_until(have_met, "an epoch of all four")


@pytest.mark.exhaustive
def test_peers_that_bring_no_ranks_found_a_run_and_join_it_and_come_back_with_the_ranks_they_had(swarm):
    light = swarm(local_steps=10, max_steps=100000, step_s=0.05)
    light.extra = {"world_rank": None}
    assert sorted(map(rank_of, light.start_all(2))) == [0, 1]
    third, fourth = light.start(2), light.start(3)
    assert sorted(map(rank_of, (third, fourth))) == [2, 3]
    wait_for_all_four(third)

    third.kill()
    again = light.start(2)
    assert rank_of(again, life=2) == rank_of(third)
    wait_for_all_four(again)
    light.check_digests()


def test_who_finds_nobody_of_the_run_is_told_so_instead_of_training_alone(swarm):
    light = swarm()
    light.extra = {"world_rank": None}
    alone = light.start(0)
    alone.process.join(90)
    assert "no peer of the run" in alone.error
