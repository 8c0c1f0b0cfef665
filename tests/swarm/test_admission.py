"""A swarm with a secret, and peers that must not join it, at every door that they can try."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from msgspec.msgpack import Decoder

from diloco.cli.app import exit_code
from peers.admission.own_token import request_token
from peers.admission.ranks import request_rank
from peers.admission.secrets import AdmissionKey, SwarmSecret
from peers.errors import PeersError, PeerUnreachable, UserError
from peers.net.channel import Channel
from peers.net.gate import Gate
from peers.net.paths import greeting
from peers.net.paths.tls import Credentials
from peers.protocol import relays, states
from peers.protocol.admission import Bans
from peers.protocol.maddrs import parse_maddr
from peers.protocol.refusal import Refusal, Refused, Why
from tests.support.closed_swarm import Closed, closed_run
from tests.support.exhaustive import exhaustive_but
from tests.support.false_coordinator import GRANT, FalseCoordinator
from tests.support.flood import Flood
from tests.support.hostile import INTRODUCTION, Hostile
from tests.support.observing import read_swarm
from tests.support.swarm import DEADLINE_S, LightPeer, LightSwarm, wait_until

RUN_ID = "closed"
REFUSED_WITHIN_S = 3.0
"""Shorter than an open door waits for a message."""
KNOCKS = 3
DROPPED_WITHIN_S = 30.0
FLOODS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    with closed_run(tmp_path_factory.mktemp("closed") / "state", RUN_ID) as closed:
        yield closed


@pytest.fixture(scope="module")
def light(run: Closed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LightSwarm]:
    """Two admitted peers, which train throughout this file."""
    worker = {"numel": 1000, "local_steps": 5, "max_steps": 10**9, "step_s": 0.04}
    with run.swarm(tmp_path_factory.mktemp("admitted"), **worker) as light:
        yield light.begin(0, 1)


def refused_at_the_mesh(hostile: Hostile, peer_id: str) -> Any:
    async def knock() -> Why:
        channel = Channel(await hostile.stream(peer_id, f"diloco/{RUN_ID}/mesh"))
        with contextlib.closing(channel):
            await channel.send(hostile.announced(), 5.0)
            answer = await channel.read(INTRODUCTION, 5.0)
            if isinstance(answer, Bans):
                answer = await channel.read(INTRODUCTION, 5.0)
            assert isinstance(answer, Refusal)
            with pytest.raises(PeerUnreachable):
                await channel.read(INTRODUCTION, 5.0)
        return answer.why

    return knock()


async def refused_by_the_coordinator(hostile: Hostile) -> None:
    with pytest.raises(UserError):
        await request_rank(
            hostile.dht, RUN_ID, None, timeout_s=5.0, gate=Gate(RUN_ID), token=hostile.claims["token"]
        )


async def refused_a_token(hostile: Hostile, run: Closed, secret: Any) -> Why:
    with pytest.raises(Refused) as caught:
        await request_token(hostile.dht, RUN_ID, secret, timeout_s=5.0)
    return caught.value.why


async def hung_up_on(hostile: Hostile, peer_id: str, protocol: str, message: Any) -> None:
    """Fails unless the peer closes this stream without an answer."""
    channel = Channel(await hostile.stream(peer_id, f"diloco/{RUN_ID}/{protocol}"))
    with contextlib.closing(channel), pytest.raises(PeerUnreachable):
        await channel.send(message, 5.0)
        await channel.read(Decoder(), 5.0)


async def refused_a_relay(hostile: Hostile, peer_id: str) -> None:
    channel = Channel(await hostile.stream(peer_id, f"diloco/{RUN_ID}/relay"))
    with contextlib.closing(channel):
        await channel.send(relays.Want(to=peer_id), 5.0)
        assert (await channel.read(Decoder(relays.No), 5.0)).reason


async def refused_a_direct_stream(hostile: Hostile, peer_id: str) -> None:
    where = parse_maddr(hostile.honest[peer_id].endpoints[0])
    sock = socket.create_connection((where.host, where.port), 5.0)
    sock.setblocking(False)
    credentials = Credentials.of(hostile.identity)
    with pytest.raises(PeersError):
        async with asyncio.timeout(5.0):
            await greeting.call(sock, credentials, peer_id, f"diloco/{RUN_ID}/data", plain=False)


def knock_everywhere(hostile: Hostile, run: Closed, secret: Any) -> dict[str, float]:
    """The seconds until each door was shut. Fails if one opens."""
    took: dict[str, float] = {}

    async def at(door: str, knock: Any) -> Any:
        began = time.monotonic()
        try:
            return await knock
        finally:
            took[door] = time.monotonic() - began

    async def knocks() -> None:
        for name, peer_id in enumerate(hostile.honest):
            await at(f"mesh of peer {name}", refused_at_the_mesh(hostile, peer_id))
            await at(f"direct port of peer {name}", refused_a_direct_stream(hostile, peer_id))
            await at(f"relay of peer {name}", refused_a_relay(hostile, peer_id))
            for protocol, message in {
                "state": states.WantState(head=hostile.honest[peer_id].head),
                "data": {"kind": "x" * 40},
                "relayed": relays.Deliver(caller=peer_id),
            }.items():
                await at(f"{protocol} of peer {name}", hung_up_on(hostile, peer_id, protocol, message))
        await at("coordinator", refused_by_the_coordinator(hostile))
        await at("issuer", refused_a_token(hostile, run, secret))

    hostile.call(knocks())
    return took


STRANGERS = {
    "without a token": (Why.NO_TOKEN, lambda run, hostile: b""),
    "with an expired token": (
        Why.EXPIRED,
        lambda run, hostile: run.token(hostile.identity.peer_id, lasts_s=-1.0),
    ),
    "with a stolen token": (
        Why.ANOTHERS,
        lambda run, hostile: next(iter(hostile.honest.values())).token,
    ),
    "with a revoked token": (Why.BANNED, lambda run, hostile: run.token(hostile.identity.peer_id)),
    "with a token that it signed itself": (
        Why.FORGED,
        lambda run, hostile: run.token(hostile.identity.peer_id, key=AdmissionKey.new()),
    ),
}


@pytest.mark.parametrize("kind", exhaustive_but(("without a token",), STRANGERS))
def test_a_stranger_is_refused_everywhere_at_once_and_logged_once(run, light, tmp_path, kind):
    why, token_of = STRANGERS[kind]
    with Hostile(tmp_path, light.initial_peers, RUN_ID) as hostile:
        peer_id = hostile.identity.peer_id
        hostile.claims["token"] = token_of(run, hostile)
        secret = SwarmSecret(run.key.secret.public_key, b"guessed" * 5)
        if why is Why.BANNED:
            run.change_bans(ban=[peer_id])
            secret = run.key.secret
        took = [knock_everywhere(hostile, run, secret) for _ in range(KNOCKS)]
        # Take the fastest knock, as the machine may have been busy during the others.
        fastest = {door: min(knock[door] for knock in took) for door in took[0]}
        print(f"{kind}: shut within {max(fastest.values()):.3f} s at the slowest of {len(fastest)} doors")
        assert max(fastest.values()) < REFUSED_WITHIN_S, took
        hostile.call(hostile.announce())
        wait_until(
            lambda: all(f"refused {peer_id}" in peer.log for peer in light.peers.values()), "the log's word"
        )
        shown = asyncio.run(read_swarm(RUN_ID, light.initial_peers, timeout_s=20, secret=run.key.secret))
    assert {peer["world_rank"] for peer in shown["peers"]} == {0, 1}
    for peer in light.peers.values():
        lines = [line for line in peer.log.splitlines() if f"refused {peer_id} at" in line]
        assert sum(line.endswith(why) for line in lines) == 1, lines
        assert len(lines) <= 2
    light.goes_on()


@pytest.mark.parametrize("is_admitted", exhaustive_but((False,), [False, True]))
def test_garbage_on_every_port_takes_no_memory_and_does_no_harm(run, light, tmp_path, is_admitted):
    """Set DILOCO_FLOOD_SECONDS=60 for floods of a minute each."""
    seconds = float(os.environ.get("DILOCO_FLOOD_SECONDS", "2"))
    with Hostile(tmp_path, light.initial_peers, RUN_ID) as hostile:
        hostile.claims["token"] = run.token(hostile.identity.peer_id) if is_admitted else b""
        flood = Flood(hostile, run.address, seed=1)
        epochs, held = light.peers[0].epoch, [memory(light)]
        for _ in range(FLOODS):
            hostile.call(flood.run(seconds), timeout_s=seconds + 30)
            held.append(memory(light))
        # Buffers and pools grow only in the first floods; a leak grows with every flood, so compare the last two.
        grown = {name: now - held[-2][name] for name, now in held[-1].items()}
        figures = dict(flood.num_sent), flood.num_bytes >> 20, light.peers[0].epoch - epochs
        print(
            f"in {FLOODS} times {seconds:g} s: sent {figures[0]}, {figures[1]} MiB; {figures[2]} epochs; "
            f"last grown by {grown} MiB"
        )
        deadline = time.monotonic() + DEADLINE_S
        while light.peers[0].epoch == epochs:
            assert time.monotonic() < deadline, "no epoch under the flood"
            hostile.call(flood.run(1.0))
    assert max(grown.values()) < 32
    # The flood reached every door; how often depends on the machine.
    assert min(flood.num_sent.values()) >= 1
    light.goes_on()


def memory(light: LightSwarm) -> dict[str, float]:
    """The memory of each daemon and its p2pd, in MiB."""
    held = {}
    for rank, peer in light.peers.items():
        daemon = psutil.Process(peer.process.pid)
        for process in (daemon, *(child for child in daemon.children() if "p2pd" in child.name())):
            held[f"{process.name()} of peer {rank}"] = process.memory_info().rss / 2**20
    return held


def ended(peer: LightPeer) -> str:
    """The error of a peer that ends by itself."""
    wait_until(lambda: not peer.process.is_alive(), "its end")
    peer.process.join()
    assert peer.process.exitcode != 0
    return peer.error


def test_a_peer_that_is_banned_while_it_trains_is_dropped_at_once_and_told_why(run, light, capsys):
    banned = light.start(2)
    wait_until(lambda: 2 in (light.peers[0].epochs[-1]["contributors"]), "an epoch with it")
    assert run.change_bans(ban=[light.peer_id(2)[-8:]]).changed == {light.peer_id(2)}
    began = time.monotonic()
    assert "is banned from the run" in ended(banned)
    assert time.monotonic() - began < DROPPED_WITHIN_S
    del light.peers[2]

    def are_told() -> bool:
        """Whether the coordinator and both peers have been told of the ban."""
        outcome = run.change_bans()
        return outcome.num_told == outcome.num_asked == 3

    wait_until(are_told, "its ban everywhere")
    after = light.peers[0].epoch + 2

    def epochs() -> list[dict[str, Any]]:
        return [record for record in light.peers[0].epochs if record["epoch"] >= after]

    wait_until(lambda: any(record["contributors"] == [0, 1] for record in epochs()), "an epoch without it")
    assert all(2 not in record["contributors"] for record in epochs())
    again = light.start(2)
    assert "is banned from the run" in ended(again)
    assert "peers unban" in again.error
    where = ["--initial-peers", run.address, "--run-id", RUN_ID, "--state-dir", str(run.config.state_dir)]
    capsys.readouterr()
    assert exit_code(["peers", "list", *where]) == 0
    assert light.peer_id(2) in capsys.readouterr().out.splitlines()
    assert exit_code(["peers", "unban", light.peer_id(2), *where]) == 0
    assert f"{light.peer_id(2)} is no longer banned" in capsys.readouterr().out
    num_epochs = len(banned.epochs)
    back = light.start(2)
    wait_until(lambda: len(back.epochs) > num_epochs, "an epoch of the peer that was let back in")
    back.kill()
    del light.peers[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["without a token", "with a token that it signed itself"])
def test_a_stranger_that_says_to_be_the_coordinator_is_asked_by_nobody(run, light, tmp_path, kind):
    """Not even by a newcomer whose user has named the stranger as an initial peer."""
    why, token_of = STRANGERS[kind]
    with Hostile(tmp_path, light.initial_peers, RUN_ID) as hostile:
        hostile.claims["token"] = token_of(run, hostile)
        stranger = FalseCoordinator(hostile, GRANT)
        hostile.call(stranger.begin())
        usual, light.extra = (
            light.extra,
            {**light.extra, "initial_peers": [stranger.address, run.address], "world_rank": None},
        )
        # A directory of its own, and so a new identity, for each case.
        newcomer = light.start(10 + light.num_started)
        light.extra = usual
        wait_until(lambda: newcomer.epochs or newcomer.error, "an epoch of the newcomer")
        assert newcomer.epochs, newcomer.error
        assert f"refused {stranger.peer_id} at the DHT: {why}" in newcomer.log
        assert not stranger.asked
    newcomer.process.terminate()
    newcomer.process.join()
    del light.peers[newcomer.rank]
    light.goes_on()
