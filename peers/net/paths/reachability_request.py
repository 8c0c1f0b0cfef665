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
BURSTS = tuple(4 << power for power in range(6))
"""In chunks, each when the one before has arrived: a slow link is not given more than it carries in a few seconds."""
SPEED_BYTES = sum(BURSTS) * reach.CHUNK_BYTES
DIALLED_PROTOCOL = "diloco/reached"
"""What the asked peer asks for when it calls back."""

_HERE: Decoder[reach.Here | reach.Busy | Refusal] = Decoder(reach.Here | reach.Busy | Refusal)
_DIALLED = Decoder(reach.Dialled)
_BURST: Decoder[reach.Chunk | reach.Mark | reach.End | reach.Busy] = Decoder(
    reach.Chunk | reach.Mark | reach.End | reach.Busy
)
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
    chunk = reach.Chunk(data=bytes(reach.CHUNK_BYTES))
    for num_chunks in BURSTS:
        began = time.monotonic()
        for _ in range(num_chunks):
            await channel.send(chunk, STALL_S)
        await channel.send(reach.Mark(), STALL_S)
        await channel.read(_GOT, STALL_S)
        if time.monotonic() - began > SPEED_S:
            break
    await channel.send(reach.End(), ANSWER_S)


async def receive_bytes(channel: Channel) -> tuple[int, float]:
    """Of the last burst, how many came after its first chunk, and how long they took."""
    measured = 0, 0.0
    arrivals: list[float] = []
    num_chunks = 0
    while True:
        message = await channel.read(_BURST, STALL_S)
        if isinstance(message, reach.End):
            return measured
        if isinstance(message, reach.Busy):
            raise Busy("it measures another link just now")
        if isinstance(message, reach.Chunk):
            arrivals.append(time.monotonic())
            num_chunks += 1
        elif arrivals:
            measured = (len(arrivals) - 1) * reach.CHUNK_BYTES, arrivals[-1] - arrivals[0]
            arrivals = []
            await channel.send(reach.Got(), ANSWER_S)
        else:
            raise ProtocolError("the end of a burst without bytes")
        if num_chunks > sum(BURSTS):
            raise ProtocolError(f"more than {SPEED_BYTES} bytes")


def rate(num_bytes: float, seconds: float) -> float:
    """Bytes/s; 0: too few to tell."""
    return num_bytes / seconds if seconds > 0 else 0.0


def _address(host: str) -> str:
    """An IP address, or nothing."""
    try:
        return str(ipaddress.ip_address(host)) if host else ""
    except ValueError as error:
        raise ProtocolError(f"no IP address: {host}") from error
