"""A hostile peer among honest ones: whatever it says, they train on and agree on every bit."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peers import joining
from peers.errors import PeersError
from peers.messages import Channel
from peers.reduction.frames import HEADER, Kind
from peers.reduction.plan import equal_bounds
from peers.round.messages import Ask, Commit, Group, Join, Proposal, parse, to_message
from tests.support.hostile import Hostile
from tests.support.swarm import LightPeer, LightSwarm, wait_until

NUMEL = 1000
RUN_ID = "hostile"


@pytest.fixture(scope="module")
def light(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightSwarm]:
    """Two honest peers, which train through all tests of this file. Their ranks leave room below."""
    directory = tmp_path_factory.mktemp("honest")
    light = LightSwarm(
        directory, [bootstrap], RUN_ID, numel=NUMEL, local_steps=5, max_steps=10**9, step_s=0.04
    )
    light.galaxy_size = 2
    try:
        for rank in (1, 2):
            light.start(rank)
        wait_until(lambda: all(peer.epoch >= 1 for peer in light.peers.values()), "the first epoch")
        yield light
    finally:
        light.close()


@pytest.fixture
def enemy(light: LightSwarm, tmp_path: Path) -> Iterator[Callable[..., Hostile]]:
    with contextlib.ExitStack() as stack:

        def make(**claims: Any) -> Hostile:
            return stack.enter_context(Hostile(tmp_path, light.initial_peers, RUN_ID, **claims))

        yield make


def goes_on(light: LightSwarm, num_epochs: int = 2, within_s: float = 30.0) -> None:
    """So many more epochs of all peers, by the processes they have been from the start."""
    before = {rank: peer.epoch for rank, peer in light.peers.items()}
    wait_until(
        lambda: all(peer.epoch >= before[rank] + num_epochs for rank, peer in light.peers.items()),
        f"{num_epochs} more epochs",
        within_s,
    )
    light.check_digests()
    for peer in light.peers.values():
        assert peer.process.is_alive() and not peer.error
        assert "Traceback" not in peer.log, peer.log[-3000:]


def test_random_bytes_on_every_protocol_disturb_nobody(light, enemy):
    hostile = enemy()
    protocols = [f"diloco/{RUN_ID}/{name}" for name in ("mesh", "data", "state")] + ["diloco/ping"]

    async def attack() -> None:
        for seed in range(3):
            await asyncio.gather(
                *(hostile.babble(peer, protocol, seed) for peer in hostile.honest for protocol in protocols)
            )

    hostile.call(attack())
    goes_on(light)


MALFORMED: list[dict[str, Any]] = [
    {"kind": ["list"]},
    {"kind": {"a": 1}},
    {"kind": "status", "status": 3},
    {"kind": "status", "status": b"\xc1" * 100},
    {"kind": "join", "fragment": 0, "lineage": "a", "proposal": [1, -1, math.nan, None, 3], "in_doubt": ""},
    {"kind": "group", "members": [[1]] * 10_000},
    {"kind": "vote", "shares": {"a": "b"}},
    {"kind": "commit", "group": None, "anchor": 1, "momentum": []},
    {"kind": "abort", "reason": "x" * 100_000},
    {"kind": "manifest", "manifest": {"hv.local_steps": [[]] * 1000}},
    {"kind": "manifest", "manifest": "x" * 500_000},
]


def test_malformed_messages_cost_their_sender_the_channel_and_nobody_else_anything(light, enemy):
    hostile = enemy()

    async def attack() -> None:
        for peer_id in list(hostile.honest):
            for message in MALFORMED:
                channel = await hostile.meet(peer_id)
                with contextlib.suppress(PeersError):
                    await channel.send(message, 5.0)
            sock = await hostile.stream(peer_id, f"diloco/{RUN_ID}/mesh")
            with sock:
                await asyncio.get_running_loop().sock_sendall(
                    sock, struct.pack("<I", 0xFFFF_FFFF) + b"x" * 1000
                )

    hostile.call(attack())
    goes_on(light)


def test_a_flood_of_messages_slows_nobody_down(light, enemy):
    hostile = enemy()

    async def flood(channel: Channel) -> None:
        message = to_message(Ask(0, "0" * 64))
        with contextlib.suppress(PeersError, OSError):
            while True:
                await channel.send(message, 60.0)

    async def attack() -> None:
        await hostile.meet_all()
        for channel in hostile.channels.values():
            hostile.spawn(flood(channel))

    hostile.call(attack())
    goes_on(light, num_epochs=6, within_s=15)


def test_a_peer_that_claims_to_be_far_ahead_and_hands_over_nothing_is_soon_ignored(light, enemy):
    hostile = enemy(
        state="training", epoch=10**6, lineage="f" * 64, anchor_digest="f" * 64, committed_tokens=1 << 61
    )
    asked: list[str] = []

    async def serve(peer_id: str, sock: Any) -> None:
        with sock:
            asked.append(peer_id)
            await asyncio.get_running_loop().sock_sendall(sock, b"\x10\0\0\0" + bytes(range(256)))

    async def attack() -> None:
        await hostile.dht.transport.serve(f"diloco/{RUN_ID}/state", serve)
        await hostile.meet_all()

    hostile.call(attack())
    goes_on(light, num_epochs=4, within_s=35)
    assert asked


def member_of_every_round(hostile: Hostile, in_group: Callable[[Group], Any]) -> None:
    """Join whatever round runs, and do the worst once in the group."""
    norm = 1.0

    async def heard(_: Hostile, channel: Channel, message: dict[str, Any]) -> None:
        if message["kind"] == "group":
            hostile.spawn(in_group(parse(message)))

    async def join_for_ever() -> None:
        while True:
            for peer_id, channel in hostile.channels.items():
                rank = hostile.claims["world_rank"]
                join = Join(0, hostile.honest[peer_id].lineage, Proposal(rank, 1 << 39, norm, 1, False), "")
                with contextlib.suppress(PeersError, OSError):
                    await channel.send(to_message(join), 5.0)
            await asyncio.sleep(0.05)

    async def attack() -> None:
        await hostile.meet_all()
        hostile.spawn(join_for_ever())

    hostile.follows, hostile.on_message = True, heard
    hostile.call(attack())


def test_a_member_that_sends_values_that_are_no_numbers_is_left_out(light, enemy):
    hostile, groups = enemy(world_rank=9), []

    async def send_nan(group: Group) -> None:
        groups.append(group)
        bounds = equal_bounds(NUMEL, len(group.ranks))
        for peer_id, peer in list(hostile.honest.items()):
            index = group.ranks.index(peer.world_rank)
            nans = struct.pack("<f", math.nan) * (bounds[index + 1] - bounds[index])
            sock = await hostile.stream(peer_id, f"diloco/{RUN_ID}/data")
            frame = bytes.fromhex(group.attempt) + HEADER.pack(Kind.CONTRIBUTION, 0, len(nans)) + nans
            await asyncio.get_running_loop().sock_sendall(sock, frame)

    member_of_every_round(hostile, send_nan)
    wait_until(lambda: groups, "a group with the hostile peer")
    goes_on(light)
    assert not any(9 in record["contributors"] for peer in light.peers.values() for record in peer.epochs)


def test_a_member_that_fails_every_attempt_and_forges_commits_stops_nobody(light, enemy):
    hostile, groups = enemy(world_rank=9), []

    async def forge(group: Group) -> None:
        groups.append(group)
        vote = {
            "kind": "vote",
            "fragment": 0,
            "lineage": group.lineage,
            "attempt": group.attempt,
            "shares": [],
        }
        for channel in hostile.channels.values():
            await channel.send(to_message(Commit(group, "0" * 64, "0" * 64)), 5.0)
            await channel.send({**vote, "anchor": "", "momentum": "", "suspects": []}, 5.0)

    member_of_every_round(hostile, forge)
    wait_until(lambda: groups, "a group with the hostile peer")
    goes_on(light)


def test_a_claim_to_a_rank_that_is_taken_displaces_nobody(light, enemy):
    hostile = enemy(world_rank=1)
    member_of_every_round(hostile, lambda group: asyncio.sleep(0))
    goes_on(light, num_epochs=4)
    assert all(record["contributors"] == [1, 2] for record in light.peers[2].epochs[-3:])


@pytest.mark.parametrize("manifest", [None, {"hv.local_steps": 5, "numel": "all of them"}])
def test_a_newcomer_takes_the_manifest_of_an_honest_peer(light, enemy, manifest):
    digest = joining.manifest_digest(manifest) if manifest else "ab" * 32
    hostile = enemy(world_rank=0, manifest_digest=digest)

    async def answer(_: Hostile, channel: Channel, message: dict[str, Any]) -> None:
        if message["kind"] == "manifest?" and manifest:
            await channel.send({"kind": "manifest", "manifest": manifest}, 5.0)

    async def announce() -> None:
        await hostile.meet_all()
        await hostile.dht.transport.serve(f"diloco/{RUN_ID}/mesh", welcome)
        await hostile.announce()

    async def welcome(peer_id: str, sock: Any) -> None:
        channel = Channel(sock)
        hostile._hear(peer_id, await channel.receive(5.0))
        await channel.send({"kind": "status", "status": hostile.status()}, 5.0)
        hostile.spawn(hostile._talk(channel))
        await hostile._listen(peer_id, channel)

    hostile.on_message = answer
    hostile.call(announce())
    newcomer = join_and_leave(light)
    assert newcomer.records("start")[-1]["local_steps"] == 5


def join_and_leave(light: LightSwarm) -> LightPeer:
    newcomer = light.start(3)
    try:
        before = len(newcomer.epochs)
        wait_until(lambda: len(newcomer.epochs) > before, "an epoch of the newcomer", 40)
        return newcomer
    finally:
        newcomer.kill()
        del light.peers[3]
