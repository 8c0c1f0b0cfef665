"""A peer of a closed swarm is banned while a newcomer asks it for the state. It ignores the ban and goes on alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.closed_swarm import Closed, closed_run
from tests.support.observing import read_swarm
from tests.support.preparations import STALLS, hold_state_until, ignore_bans
from tests.support.swarm import LightPeer, LightSwarm, check_well, wait_until

RUN_ID = "banned"
HONEST, BANNED, FETCHING, LATE = (0, 1, 2), 3, 4, 5
OUT_WITHIN_S = 10.0
EPOCHS = 3


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Closed]:
    with closed_run(tmp_path / "state", RUN_ID) as closed:
        yield closed


@pytest.fixture
def light(run: Closed, tmp_path: Path) -> Iterator[LightSwarm]:
    with run.swarm(tmp_path / "peers", local_steps=5, max_steps=10**9, step_s=0.04) as light:
        yield light


@pytest.mark.exhaustive
def test_a_banned_peer_that_goes_on_takes_nobody_along(run, light, tmp_path):
    is_banned = tmp_path / "is-banned"
    light.preparations = {rank: partial(hold_state_until, is_banned) for rank in HONEST}
    light.preparations[BANNED] = ignore_bans
    everybody = [*HONEST, BANNED]
    light.start_all(len(everybody))
    banned = light.peers[BANNED]
    honest = [light.peers[rank] for rank in HONEST]
    wait_until(lambda: all(has_round_of(peer, everybody) for peer in light.peers.values()), "a round of all")

    light.start(FETCHING)
    wait_until(
        lambda: f"{STALLS} {light.peer_id(FETCHING)}" in banned.log, "a newcomer that asks for its state"
    )
    assert not light.peers[FETCHING].epochs
    before = honest[0].epoch
    run.change_bans(ban=[light.peer_id(BANNED)])
    # Read the clock only now: `change_bans` first joins the DHT, which takes some time.
    banned_at = time.time()
    is_banned.touch()
    wait_until(lambda: all("is banned" in peer.log for peer in honest), "word of the ban", OUT_WITHIN_S)
    wait_until(lambda: has_round_of(honest[0], [*HONEST, FETCHING], since=before), "a round of the others")

    wait_until(lambda: banned.epochs[-1]["contributors"] == [BANNED], "a commit of its own")
    light.initial_peers = [banned.address, run.address]
    late = light.start(LATE)
    wait_until(lambda: late.epochs, "an epoch of the newcomer that knows it")
    assert f"{STALLS} {light.peer_id(LATE)}" not in banned.log
    remaining = {light.peer_id(rank) for rank in light.peers} - {light.peer_id(BANNED)}
    wait_until(lambda: rosters(run) == [remaining] * len(remaining), "a roster without it")

    since = late.epoch
    wait_until(lambda: all(peer.epoch >= since + EPOCHS for peer in honest), f"{EPOCHS} more epochs")
    del light.peers[BANNED]
    light.check_digests()
    assert banned.epochs[-1]["anchor_digest"] not in light.check_digests().values()
    check_well(light.peers.values())
    for peer in light.peers.values():
        with_it = [record["time"] for record in peer.epochs if BANNED in record["contributors"]]
        assert max(with_it, default=0.0) < banned_at + OUT_WITHIN_S


def has_round_of(peer: LightPeer, ranks: list[int], since: int = 0) -> bool:
    return any(record["contributors"] == ranks for record in peer.epochs if record["epoch"] > since)


def rosters(run: Closed) -> list[set[str]]:
    """The roster of each admitted peer's newest certificate."""
    shown = asyncio.run(read_swarm(RUN_ID, [run.address], timeout_s=20, secret=run.key.secret))
    rosters_by_head = {head: one["roster"] for head, one in shown["certificates"].items()}
    return [
        {member["peer_id"] for member in rosters_by_head.get(peer["head"], ())} for peer in shown["peers"]
    ]
