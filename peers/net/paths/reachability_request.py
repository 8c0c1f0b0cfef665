"""Asks a member of the swarm what a machine cannot see of itself; the messages are those of peers/protocol/reach.py."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable, ProtocolError
from peers.net.channel import Channel, call
from peers.net.transport import StreamTransport
from peers.protocol import reach
from peers.protocol.refusal import Refusal, unless_refused
from peers.timing import ANSWER_S, OFTEN_S, PROBE_S, STALL_S

SPEED_S = OFTEN_S
"""A measurement of speed ends with the first burst that took longer, in each direction."""
_PIECE_BYTES = 32 << 10
DIALLED_PROTOCOL = "diloco/reached"
"""What the asked peer asks for when it calls back."""

_HERE: Decoder[reach.Here | reach.Busy | Refusal] = Decoder(reach.Here | reach.Busy | Refusal)
_DIALLED = Decoder(reach.Dialled)
_BURST: Decoder[reach.Burst | reach.Busy] = Decoder(reach.Burst | reach.Busy)
_GOT = Decoder(reach.Got)
_TOOK = Decoder(reach.Took)


class Busy(PeerUnreachable):
    """The asked peer has done as much of this as it does in a while."""


@dataclass(frozen=True)
class Here:
    """What the asked peer sees of the caller."""

    host: str
    """The IP address that the caller's connection comes from; empty where a third peer forwards it."""
    ahead_s: float
    """How far the caller's clock is ahead of the asked peer's, to within half of the round trip."""
    round_trip_s: float


@dataclass(frozen=True)
class Speed:
    """Of the largest burst that was tried, 4 MB at most. Bytes/s; 0: too quick to tell."""

    to_peer: float
    from_peer: float


class Asked:
    """A conversation with one member. Every call raises PeerUnreachable, ProtocolError or Refused."""

    def __init__(self, channel: Channel, here: Here) -> None:
        self._channel, self.here = channel, here

    async def dial(self, port: int) -> str:
        """Have this machine called at a port: why that failed, or nothing."""
        await self._channel.send(reach.Dial(port=port), ANSWER_S)
        return (await self._channel.read(_DIALLED, ANSWER_S + PROBE_S)).error

    async def speed(self) -> Speed:
        """Move some megabytes both ways."""
        await self._channel.send(reach.Speed(), ANSWER_S)
        num_bytes, seconds = await receive_bytes(self._channel)
        await send_bytes(self._channel)
        took = await self._channel.read(_TOOK, ANSWER_S)
        return Speed(rate(took.num_bytes, took.seconds), rate(num_bytes, seconds))


@contextlib.asynccontextmanager
async def asking(
    transport: StreamTransport,
    peer_id: str,
    run_id: str,
    *,
    token: bytes = b"",
    maddrs: Sequence[str] = (),
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Asked]:
    """Begin to ask a member. Raises PeerUnreachable where it does not answer, Refused where it does not want to."""
    protocol, most_bytes = reach.reach_protocol(run_id), reach.MAX_MESSAGE_BYTES
    with await call(
        transport, peer_id, protocol, timeout_s=ANSWER_S, maddrs=maddrs, max_message_bytes=most_bytes
    ) as channel:
        began, before = time.monotonic(), clock()
        await channel.send(reach.Hello(token=token), ANSWER_S)
        answer = await channel.read(_HERE, ANSWER_S)
        round_trip_s = time.monotonic() - began
        if isinstance(answer, reach.Busy):
            raise Busy("it has answered many such questions lately; ask again in a minute")
        here = unless_refused(answer)
        ahead_s = before + round_trip_s / 2 - here.time
        yield Asked(channel, Here(_address(here.host), ahead_s, round_trip_s))


async def send_bytes(channel: Channel) -> None:
    """Larger and larger bursts, until one takes long."""
    zeros = memoryview(bytes(reach.BURSTS[-1]))
    for num_bytes in reach.BURSTS:
        began = time.monotonic()
        await channel.send(reach.Burst(num_bytes=num_bytes), STALL_S)
        await channel.send_bytes(zeros[:num_bytes], STALL_S)
        await channel.read(_GOT, STALL_S)
        if time.monotonic() - began > SPEED_S:
            break
    await channel.send(reach.Burst(num_bytes=0), ANSWER_S)


async def receive_bytes(channel: Channel) -> tuple[int, float]:
    """Of the last burst, how many came after its first piece, and how long they took."""
    measured, buffer = (0, 0.0), memoryview(bytearray(_PIECE_BYTES))
    for _ in range(len(reach.BURSTS) + 1):
        burst = await channel.read(_BURST, STALL_S)
        if isinstance(burst, reach.Busy):
            raise Busy("it measures another link just now")
        if not burst.num_bytes:
            return measured
        first = await channel.receive_bytes(buffer[: burst.num_bytes], STALL_S)
        began, left = time.monotonic(), burst.num_bytes - first
        while left:
            left -= await channel.receive_bytes(buffer[:left], STALL_S)
        measured = burst.num_bytes - first, time.monotonic() - began
        await channel.send(reach.Got(), ANSWER_S)
    raise ProtocolError(f"more than {len(reach.BURSTS)} bursts")


def rate(num_bytes: float, seconds: float) -> float:
    """Bytes/s; 0: too few to tell."""
    return num_bytes / seconds if seconds > 0 else 0.0


def _address(host: str) -> str:
    """An IP address, or nothing."""
    try:
        return str(ipaddress.ip_address(host)) if host else ""
    except ValueError as error:
        raise ProtocolError(f"no IP address: {host}") from error
