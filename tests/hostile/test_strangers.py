"""A hostile peer among honest ones: whatever it sends, they train on and agree on every bit."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from peers.core import joining
from peers.core.plans import Entry, plan_of
from peers.core.settings import Settings
from peers.errors import PeersError
from peers.net.channel import Channel
from peers.net.states.server import StateServer
from peers.protocol.certificates import Body, Certificate, Work
from peers.protocol.limits import MAX_ATTEMPT
from peers.protocol.mesh import Carried, Manifest, WantManifest
from peers.protocol.messages import Ask, Certificates, Message, Status
from peers.protocol.refusal import Why
from peers.protocol.states import state_protocol
from peers.state.outer_state import OuterState
from tests.support.hostile import INTRODUCTION, Hostile
from tests.support.preparations import agree_once_met, claim_rank, forge_votes, poison
from tests.support.real_liars import NUMEL, made_up_state
from tests.support.swarm import LightPeer, LightSwarm, wait_until

LOCAL_STEPS = 5
FIRST_NEWCOMER = 10
WITHIN_S = 60.0
RUN_ID = "hostile"


@pytest.fixture(scope="module")
def light(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightSwarm]:
    """Two honest peers, which train throughout this file. Their ranks, 1 and 2, leave rank 0 free."""
    directory = tmp_path_factory.mktemp("honest")
    worker = {"numel": NUMEL, "local_steps": LOCAL_STEPS, "max_steps": 10**9, "step_s": 0.04}
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


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "sends values that are no numbers": (partial(poison, "not finite"), "with values that are not finite"),
    "signs its votes with another key": (forge_votes, "votes that are not signed"),
}
"""What a newcomer does wrong, and what its leader logs then."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_newcomer_is_in_no_commit_that(light, fault):
    prepare, noticed = FAULTS[fault]
    before = light.least_epoch()

    def is_in_a_commit() -> bool:
        records = [record for peer in light.peers.values() for record in peer.epochs]
        return any(set(record["contributors"]) - {1, 2} for record in records if record["epoch"] > before)

    def is_noticed() -> bool:
        return any(noticed in peer.log for peer in light.peers.values())

    with joined(light, prepare):
        wait_until(lambda: is_noticed() or is_in_a_commit(), "its fault", WITHIN_S)
        light.goes_on(within_s=WITHIN_S)
    assert is_noticed() and not is_in_a_commit()


def test_a_newcomer_that_claims_a_rank_that_is_taken_displaces_nobody(light):
    with joined(light, partial(claim_rank, 1)):
        wait_until(
            lambda: light.peers[2].epochs[-1]["contributors"] == [0, 1, 2], "a commit of all three", WITHIN_S
        )
        light.goes_on()
        assert [peer.epochs[-1]["world_rank"] for peer in light.peers.values()] == [1, 2]
    wait_until(lambda: light.peers[2].epochs[-1]["contributors"] == [1, 2], "a commit without it", WITHIN_S)


def test_nobody_follows_a_commit_whose_signatures_are_forged(light, enemy):
    """It follows from their head by the rules, names both of them as signers, and comes with the state it leads to."""
    hostile, state = enemy(world_rank=9), made_up_state()
    forged: dict[str, Certificate] = {}
    shown, served, known = list[str](), list[str](), set[str]()

    async def heard(_: Hostile, peer_id: str, message: Message) -> None:
        match message:
            case Status(head=head) if head and head not in known:
                known.add(head)
                await hostile.say(peer_id, Ask(head=head))
            case Certificates(certificates=(*_, parent)):
                certificate = forged_after(parent, hostile, state)
                forged[certificate.head] = certificate
                state.certify(certificate)
                status = hostile.standing(
                    phase="training", head=certificate.head, epoch=certificate.plan.epoch
                )
                for other in list(hostile.channels):
                    await hostile.say(other, status)
            case Ask(head=head) if head in forged:
                await hostile.say(peer_id, Certificates(head=head, certificates=(forged[head],)))
                shown.append(peer_id)

    async def attack() -> None:
        server = StateServer(hostile.dht.transport, RUN_ID, lambda: state)

        async def serve(peer_id: str, sock: Any) -> None:
            served.append(peer_id)
            await server._accepted(peer_id, sock)

        await hostile.dht.transport.serve(state_protocol(RUN_ID), serve)
        await hostile.meet_all()

    hostile.on_said = heard
    hostile.call(attack())
    wait_until(lambda: len(set(shown)) == 2, "forged certificates shown to both", WITHIN_S)
    light.goes_on(num_epochs=4)
    assert not served
    assert state.anchor_digest not in light.check_digests().values()


def forged_after(parent: Certificate, hostile: Hostile, state: OuterState) -> Certificate:
    """A commit of all members that leads to this state. The hostile peer signs for all of them."""
    roster = {member.peer_id: member.world_rank for member in parent.plan.roster}
    work = Work(tokens=50, norm=1.0, step=5, based_on=parent.plan.epoch)
    plan = plan_of(
        parent,
        # By the Fork rule it wins over their next commit.
        MAX_ATTEMPT,
        {peer_id: Entry(rank, work) for peer_id, rank in roster.items()},
        off=(),
        data_width=0,
        settings=Settings(manifest=parent.plan.manifest, steps_per_epoch=LOCAL_STEPS),
    )
    body = Body(plan=plan, anchor=state.anchor_digest, momentum=state.header.momentum_digest)
    return Certificate(body=body, signatures=(hostile.identity.sign(body.signed_bytes),) * len(plan.signers))


def test_a_newcomer_takes_the_manifest_of_most_peers_not_that_of_the_lowest_rank(light, enemy):
    false = {"hv.local_steps": LOCAL_STEPS + 2, "hv.outer_lr": 0.7, "hv.outer_momentum": 0.9, "numel": NUMEL}
    hostile = enemy(world_rank=0, manifest_digest=joining.manifest_digest(false))
    hostile.follows = True

    async def answer(_: Hostile, channel: Channel, message: Carried) -> None:
        if isinstance(message, WantManifest):
            await channel.send(Manifest(fields=false), 5.0)

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
    met = (hostile.identity.peer_id, *map(light.peer_id, light.peers))
    with joined(light, partial(agree_once_met, *met)) as newcomer:
        [start] = wait_until(lambda: newcomer.records("start"), "the newcomer's start", WITHIN_S)
        assert start["local_steps"] == LOCAL_STEPS
        wait_until(lambda: newcomer.epochs, "an epoch of the newcomer", WITHIN_S)


@contextlib.contextmanager
def joined(light: LightSwarm, prepare: Callable[[], object]) -> Iterator[LightPeer]:
    """A further peer with a key of its own, whose process calls `prepare` first. It leaves at the end."""
    number = FIRST_NEWCOMER + light.num_started
    light.preparations[number] = prepare
    newcomer = light.start(number)
    # `light.peers` are the honest ones.
    del light.peers[number]
    try:
        yield newcomer
    finally:
        newcomer.process.terminate()
        newcomer.process.join()
