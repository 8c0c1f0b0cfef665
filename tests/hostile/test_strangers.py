"""A hostile peer among honest ones: whatever it sends, they train on and agree on every bit."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.core import joining
from peers.errors import PeersError
from peers.net.channel import Channel
from peers.protocol.certificates import Body, Certificate, Plan, Signature, Work
from peers.protocol.mesh import Carried, Manifest, WantManifest
from peers.protocol.messages import Ask, Certificates, Message, Propose, Vote
from peers.protocol.refusal import Why
from peers.reduce.frames import HEADER, Kind
from peers.reduce.plan import ATTEMPT_BYTES
from peers.reduce.shares import bounds_of
from tests.support.exhaustive import exhaustive_but
from tests.support.hostile import INTRODUCTION, Hostile
from tests.support.swarm import LightPeer, LightSwarm, wait_until

NUMEL = 1000
RUN_ID = "hostile"


@pytest.fixture(scope="module")
def light(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightSwarm]:
    """Two honest peers, which train throughout this file. Their ranks, 1 and 2, leave rank 0 free."""
    directory = tmp_path_factory.mktemp("honest")
    worker = {"numel": NUMEL, "local_steps": 5, "max_steps": 10**9, "step_s": 0.04}
    with LightSwarm(directory, [bootstrap], RUN_ID, **worker) as light:
        yield light.begin(1, 2)


@pytest.fixture
def enemy(light: LightSwarm, tmp_path: Path) -> Iterator[Callable[..., Hostile]]:
    with contextlib.ExitStack() as stack:

        def make(**claims: Any) -> Hostile:
            return stack.enter_context(Hostile(tmp_path, light.initial_peers, RUN_ID, **claims))

        yield make


def test_random_bytes_on_every_protocol_disturb_nobody(light, enemy):
    hostile = enemy()
    protocols = [f"diloco/{RUN_ID}/{name}" for name in ("mesh", "data", "state")]

    async def attack() -> None:
        for seed in range(3):
            await asyncio.gather(
                *(hostile.babble(peer, protocol, seed) for peer in hostile.honest for protocol in protocols)
            )

    hostile.call(attack())
    light.goes_on()


MALFORMED: list[dict[str, Any]] = [
    {},
    {"type": ["list"]},
    {"type": {"a": 1}},
    {"type": "refused", "why": Why.BANNED},
    {"type": "announced", "record": 3},
    {"type": "announced", "record": b"\xc1" * 100},
    {"type": "announced", "record": b"\xc1" * 100_000},
    {"type": "join", "fragment": 0},
    {"type": "propose"},
    {"type": "propose", "plan": [[1]] * 10_000},
    {"type": "propose", "plan": b"\xc1" * 1000},
    {"type": "status", "incarnation": -1, "sequence": math.nan},
    {"type": "vote", "head": "a", "attempt": 1 << 62},
    {"type": "certificates", "head": "f" * 64, "certificates": [0] * 33},
    {"type": "abort", "head": "", "attempt": 0, "reason": "x" * 9999},
    {"type": "bans", "signed": b"x" * 100_000},
    {"type": "manifest", "fields": {"hv.local_steps": [[]] * 1000}},
    {"type": "manifest", "fields": {"hv.outer_lr": math.nan}},
    {"type": "manifest", "fields": "x" * 500_000},
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
    light.goes_on()


def test_a_flood_of_messages_slows_nobody_down(light, enemy):
    hostile = enemy()

    async def flood(channel: Channel) -> None:
        message = Ask(head="0" * 64)
        with contextlib.suppress(PeersError, OSError):
            while True:
                await channel.send(message, 60.0)

    async def attack() -> None:
        await hostile.meet_all()
        for channel in hostile.channels.values():
            hostile.spawn(flood(channel))

    began = time.monotonic()
    light.goes_on(num_epochs=6)
    usual_s = time.monotonic() - began
    hostile.call(attack())
    light.goes_on(num_epochs=6, within_s=max(60, 10 * usual_s))


def test_nobody_asks_a_peer_for_its_state_that_claims_to_be_far_ahead_and_shows_no_commits(light, enemy):
    hostile = enemy(
        state="training", epoch=10**6, head="f" * 64, anchor_digest="f" * 64, committed_tokens=1 << 61
    )
    asked: list[str] = []
    asked_for_commits: list[Ask] = []

    async def serve(peer_id: str, sock: Any) -> None:
        with sock:
            asked.append(peer_id)
            await asyncio.get_running_loop().sock_sendall(sock, b"\x10\0\0\0" + bytes(range(256)))

    async def attack() -> None:
        await hostile.dht.transport.serve(f"diloco/{RUN_ID}/state", serve)
        await hostile.meet_all()
        hostile.spawn(boast())

    async def boast() -> None:
        while True:
            for peer_id in list(hostile.channels):
                await hostile.say(peer_id, hostile.standing(phase="training", head="f" * 64, epoch=10**6))
            await asyncio.sleep(0.3)

    async def heard(_: Hostile, peer_id: str, message: Message) -> None:
        if isinstance(message, Ask):
            asked_for_commits.append(message)
            await hostile.say(peer_id, Certificates(head=message.head, certificates=()))

    hostile.on_said = heard
    hostile.call(attack())
    wait_until(lambda: asked_for_commits, "a question for the commits that lead there")
    light.goes_on(num_epochs=4, within_s=90)
    assert not asked


def member_of_every_round(hostile: Hostile, in_group: Callable[[str, Plan], Any]) -> None:
    """Be ready for every round, and run `in_group` with the leader and the plan whenever a leader proposes one."""

    async def heard(_: Hostile, leader: str, message: Message) -> None:
        if isinstance(message, Propose):
            hostile.spawn(in_group(leader, message.plan))

    async def be_ready_for_ever() -> None:
        while True:
            for peer_id, theirs in list(hostile.statuses.items()):
                work = Work(tokens=1 << 39, norm=1.0, step=1, based_on=theirs.epoch)
                status = hostile.standing(head=theirs.head, epoch=theirs.epoch, work=work)
                await hostile.say(peer_id, status)
            await asyncio.sleep(0.05)

    async def attack() -> None:
        await hostile.meet_all()
        hostile.spawn(be_ready_for_ever())

    hostile.follows, hostile.on_said = True, heard
    hostile.call(attack())


def test_a_member_that_sends_values_that_are_no_numbers_is_left_out(light, enemy):
    hostile, plans = enemy(world_rank=9), []

    async def send_nan(_: str, plan: Plan) -> None:
        plans.append(plan)
        bounds = bounds_of([c.work.bandwidth for c in plan.contributors], NUMEL)
        for index, contributor in enumerate(plan.contributors):
            if contributor.peer_id == hostile.identity.peer_id:
                continue
            nans = struct.pack("<f", math.nan) * (bounds[index + 1] - bounds[index])
            sock = await hostile.stream(contributor.peer_id, f"diloco/{RUN_ID}/data")
            frame = bytes.fromhex(plan.digest)[:ATTEMPT_BYTES]
            frame += HEADER.pack(Kind.CONTRIBUTION, 0, len(nans)) + nans
            await asyncio.get_running_loop().sock_sendall(sock, frame)

    member_of_every_round(hostile, send_nan)
    wait_until(lambda: plans, "a group with the hostile peer")
    light.goes_on()
    assert not any(9 in record["contributors"] for peer in light.peers.values() for record in peer.epochs)


@pytest.mark.exhaustive
def test_a_member_that_fails_every_attempt_and_forges_commits_stops_nobody(light, enemy):
    hostile, plans = enemy(world_rank=9), []

    async def forge(leader: str, plan: Plan) -> None:
        plans.append(plan)
        body = Body(plan=plan, anchor="0" * 64, momentum="0" * 64)
        forged = hostile.identity.sign(body.signed_bytes)
        certificate = Certificate(body=body, signatures=tuple(forged for _ in plan.signers))
        vote = Vote(
            head=plan.parent,
            attempt=plan.attempt,
            plan=plan.digest,
            anchor=body.anchor,
            momentum=body.momentum,
            signature=Signature(public_key=b"", signature=b"forged"),
        )
        for peer_id in list(hostile.channels):
            await hostile.say(peer_id, Certificates(head=certificate.head, certificates=(certificate,)))
            await hostile.say(peer_id, vote)

    member_of_every_round(hostile, forge)
    wait_until(lambda: plans, "a group with the hostile peer")
    light.goes_on()
    assert not any(9 in record["contributors"] for peer in light.peers.values() for record in peer.epochs)


def test_a_claim_to_a_rank_that_is_taken_displaces_nobody(light, enemy):
    hostile = enemy(world_rank=1)
    member_of_every_round(hostile, lambda leader, plan: asyncio.sleep(0))
    light.goes_on(num_epochs=4)
    assert all(record["contributors"] == [1, 2] for record in light.peers[2].epochs[-3:])


@pytest.mark.parametrize(
    "manifest", exhaustive_but((None,), [None, {"hv.local_steps": 5, "numel": "all of them"}])
)
def test_a_newcomer_takes_the_manifest_of_an_honest_peer(light, enemy, manifest):
    digest = joining.manifest_digest(manifest) if manifest else "ab" * 32
    hostile = enemy(world_rank=0, manifest_digest=digest)

    async def answer(_: Hostile, channel: Channel, message: Carried) -> None:
        if isinstance(message, WantManifest) and manifest:
            await channel.send(Manifest(fields=manifest), 5.0)

    async def announce() -> None:
        await hostile.meet_all()
        await hostile.dht.transport.serve(f"diloco/{RUN_ID}/mesh", welcome)
        await hostile.announce()

    async def welcome(peer_id: str, sock: Any) -> None:
        channel = Channel(sock)
        hostile._hear(peer_id, await channel.read(INTRODUCTION, 5.0))
        await channel.send(hostile.announced(), 5.0)
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
        wait_until(lambda: len(newcomer.epochs) > before, "an epoch of the newcomer", 90)
        return newcomer
    finally:
        newcomer.kill()
        del light.peers[3]
