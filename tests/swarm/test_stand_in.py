"""A run without a coordinator: the lowest live peer gives world ranks, and remembers those of others."""

from __future__ import annotations

import re
from typing import Any

from peers.ranks.ledger import RESERVED
from tests.support.swarm import LightPeer, LightSwarm, wait_until


def start_without_a_number(light: LightSwarm, number: int) -> LightPeer:
    numbered: dict[str, Any] = light.extra
    light.extra = {**numbered, "world_rank": None}
    peer = light.start(number)
    light.extra = numbered
    return peer


def rank_of(peer: LightPeer, life: int = 1) -> int:
    ranks = wait_until(
        lambda: re.findall(r"in the swarm as world rank (\d+)", peer.log)[life - 1 :], "a world rank"
    )
    return int(ranks[0])


def test_newcomers_get_ranks_from_the_lowest_live_peer_and_their_own_again_from_the_next(swarm):
    light = swarm(local_steps=10, max_steps=100000, step_s=0.05)
    first, second = light.start_all(2)
    wait_until(lambda: min(first.epoch, second.epoch) >= 1, "epoch 1")

    guest = start_without_a_number(light, 8)
    rank = rank_of(guest)
    assert rank == RESERVED[0]
    wait_until(lambda: any(rank in record["contributors"] for record in second.epochs), "its work")

    first.kill()
    guest.kill()
    other = start_without_a_number(light, 9)
    assert rank_of(other) == RESERVED[1], "another stand-in gives other ranks"
    assert rank_of(start_without_a_number(light, 8), life=2) == rank
    wait_until(lambda: {1, rank, RESERVED[1]} <= set(second.epochs[-1]["contributors"]), "an epoch of all")
    light.check_digests()
