"""A member that is asked whether it can reach a machine, and callers that would have it dial somebody else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.msgpack import Decoder

from peers.admission.secrets import AdmissionKey
from peers.errors import PeerUnreachable, ProtocolError
from peers.net.channel import Channel
from peers.net.dht.node import Dht
from peers.net.gate import Gate
from peers.net.identity import load_or_create
from peers.net.paths import reachability
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.direct import Direct
from peers.net.paths.reachability import DIALLED_PROTOCOL, Busy, Reachability, asking
from peers.net.paths.tls import Credentials
from peers.protocol import reach
from peers.protocol.refusal import Refused, Why
from tests.support.members import joined

RUN = "reach"
_SAID = Decoder(reach.Here | reach.Busy | reach.Dialled | reach.Burst | reach.Got)


@dataclass
class Asker:
    """A client of the DHT, which listens on no port unless a test makes it listen."""

    dht: Dht
    credentials: Credentials
    answering: str

    def asking(self, **options: Any) -> Any:
        return asking(self.dht.transport, self.answering, RUN, **options)

    async def conversation(self, *messages: Any) -> Channel:
        """A stream on which all these messages have been sent, and all but the last have been answered."""
        protocol = reach.reach_protocol(RUN)
        channel = Channel(await self.dht.transport.open(self.answering, protocol, timeout_s=10))
        for message in messages[:-1]:
            await channel.send(message, 10)
            await channel.read(_SAID, 10)
        await channel.send(messages[-1], 10)
        return channel


@contextlib.asynccontextmanager
async def asker(directory: Path, bootstrap: str, gate: Gate | None = None) -> AsyncIterator[Asker]:
    async with joined(directory, "member", bootstrap) as member:
        # The member's DHT has locked the key file, so load the same key from a copy.
        (directory / "copy.key").write_bytes((directory / "member.key").read_bytes())
        identity = load_or_create(directory / "copy.key")
        service = Reachability(RUN, identity, member.transport, gate or Gate(RUN))
        await service.start()
        maddrs = await member.maddrs()
        async with joined(directory, "asker", *maddrs, client_mode=True) as dht:
            (directory / "asker2.key").write_bytes((directory / "asker.key").read_bytes())
            own = load_or_create(directory / "asker2.key")
            yield Asker(dht, Credentials.of(own), member.peer_id)
            own.release()
        identity.release()


@contextlib.asynccontextmanager
async def listening(credentials: Credentials) -> AsyncIterator[int]:
    """A port on which the holder of this key answers."""

    async def hang_up(_peer_id: str, stream: socket.socket) -> None:
        stream.close()

    acceptor = Acceptor(credentials, allows=lambda _: True)
    acceptor.serve(DIALLED_PROTOCOL, hang_up)
    direct = Direct(acceptor, lambda _: ())
    direct.listen("/ip4/127.0.0.1/tcp/0")
    try:
        yield direct.port
    finally:
        await direct.close()


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def test_a_member_tells_what_it_sees_and_calls_back_only_who_answers_with_the_callers_key(
    tmp_path, bootstrap
):
    async with asker(tmp_path, bootstrap) as ours:
        stranger = load_or_create(tmp_path / "stranger.key")
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            async with (
                listening(ours.credentials) as port,
                listening(Credentials.of(stranger)) as others,
                ours.asking() as asked,
            ):
                assert asked.here.host == "127.0.0.1"
                assert abs(asked.here.ahead_s) < 5
                assert await asked.dial(port) == ""
                assert await asked.dial(others) == "this machine does not answer there"
                assert await asked.dial(closed.getsockname()[1]) == "connection refused"
                assert await asked.dial(port) == ""
                # One conversation allows four calls.
                with pytest.raises(PeerUnreachable):
                    await asked.dial(port)
        stranger.release()


async def test_the_clock_of_who_asks_is_compared(tmp_path, bootstrap):
    async with asker(tmp_path, bootstrap) as ours:
        import time

        async with ours.asking(clock=lambda: time.time() - 100) as asked:
            assert -105 < asked.here.ahead_s < -95


async def test_bytes_go_both_ways_and_not_more_than_a_few(tmp_path, bootstrap):
    async with asker(tmp_path, bootstrap) as ours:
        async with ours.asking() as asked:
            speed = await asked.speed()
            assert speed.to_peer > 1e4 and speed.from_peer > 1e4
            with pytest.raises((PeerUnreachable, ProtocolError)):
                await asked.speed()

        # A caller that sends without end is cut off.
        channel = await ours.conversation(reach.Hello(token=b""), reach.Speed())
        while num_bytes := (await channel.read(_SAID, 10)).num_bytes:
            await channel.fill(memoryview(bytearray(num_bytes)), 10)
            await channel.send(reach.Got(), 10)
        longest = reach.BURSTS[-1]
        with pytest.raises(PeerUnreachable):
            for _ in range(4 * len(reach.BURSTS)):
                await channel.send(reach.Burst(num_bytes=longest), 10)
                await channel.send_bytes(memoryview(bytes(longest)), 10)
                await channel.read(_SAID, 10)
        channel.close()


@pytest.mark.parametrize(
    "question",
    [
        {"type": "dial", "port": 22, "host": "203.0.113.7"},
        {"type": "dial", "port": 0},
        {"type": "burst", "num_bytes": 1},
        {"type": "run", "command": "reboot"},
    ],
)
async def test_a_question_that_is_none_ends_the_conversation(question, tmp_path, bootstrap, monkeypatch):
    async def never(*_: Any, **__: Any) -> None:
        raise AssertionError("somebody was dialled")

    async with asker(tmp_path, bootstrap) as ours:
        monkeypatch.setattr(Direct, "open", never)
        channel = await ours.conversation(reach.Hello(token=b""), question)
        with pytest.raises(PeerUnreachable):
            await channel.read(_SAID, 10)
        channel.close()


async def test_who_asks_again_and_again_is_asked_to_wait(tmp_path, bootstrap, monkeypatch):
    monkeypatch.setattr(reachability, "_CONVERSATIONS_PER_S", 0.0)
    async with asker(tmp_path, bootstrap) as ours:
        answered = 0
        with pytest.raises(Busy):
            for _ in range(20):
                async with ours.asking():
                    answered += 1
        assert answered == reachability._CONVERSATIONS_AT_ONCE


async def test_in_a_closed_swarm_only_who_is_admitted_is_answered(tmp_path, bootstrap):
    key = AdmissionKey.new()
    gate = Gate(RUN, key.secret.public_key)
    async with asker(tmp_path, bootstrap, gate) as ours:
        with pytest.raises(Refused) as refused:
            async with ours.asking():
                pass
        assert refused.value.why is Why.NO_TOKEN
