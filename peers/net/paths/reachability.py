"""What a machine cannot see of itself, asked of a member of the swarm; the messages are in peers/protocol/reach.py.

Dialling any address that a caller names would make the asked peer a reflector. So callers name none: only the host that
the caller's own connection comes from is dialled, which cannot be forged over TCP. Only peers that the gate admits may
ask, and only so often.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable, ProtocolError, UserError
from peers.net.channel import Channel, call
from peers.net.gate import Gate
from peers.net.identity import Identity
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.direct import Direct, source_of
from peers.net.paths.tls import Credentials
from peers.net.rate_limit import RateLimits
from peers.net.transport import StreamTransport
from peers.protocol import reach
from peers.protocol.maddrs import Maddr, parse_maddr
from peers.protocol.refusal import Refusal, Refused, unless_refused
from peers.timing import ANSWER_S, COMMIT_S, OFTEN_S, PROBE_S, STALL_S

if TYPE_CHECKING:
    from peers.net.libp2p.transport import Transport

SPEED_S = OFTEN_S
"""A measurement of speed ends with the first burst that took longer, in each direction."""
_PIECE_BYTES = 32 << 10
DIALLED_PROTOCOL = "diloco/reached"
"""The protocol that the asked peer requests when it dials back."""

_HERE: Decoder[reach.Here | reach.Busy | Refusal] = Decoder(reach.Here | reach.Busy | Refusal)
_DIALLED = Decoder(reach.Dialled)
_BURST: Decoder[reach.Burst | reach.Busy] = Decoder(reach.Burst | reach.Busy)
_GOT = Decoder(reach.Got)
_TOOK = Decoder(reach.Took)


class Busy(PeerUnreachable):
    """The asked peer has reached its limit for such requests."""


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
    """In bytes/s, by the largest burst sent, which has 4 MiB at most; 0: too quick to tell."""

    to_peer: float
    from_peer: float


class Asked:
    """A conversation with one member. Every call raises PeerUnreachable, ProtocolError or Refused."""

    def __init__(self, channel: Channel, here: Here) -> None:
        self._channel, self.here = channel, here

    async def dial(self, port: int) -> str:
        """Have this machine dialled at a port. Returns why that failed; empty if it succeeded."""
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
    """Open a conversation with a member. Raises PeerUnreachable if it does not answer, Refused if it refuses."""
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
    """Send larger and larger bursts, until one takes longer than SPEED_S."""
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
    """Receive bursts. Returns how many bytes of the last one came after its first piece, and how long they took."""
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
    """Bytes/s; 0: too quick to tell."""
    return num_bytes / seconds if seconds > 0 else 0.0


def _address(host: str) -> str:
    """The IP address, or nothing. Raises ProtocolError."""
    try:
        return str(ipaddress.ip_address(host)) if host else ""
    except ValueError as error:
        raise ProtocolError(f"no IP address: {host}") from error


MAX_DIALS = 4
"""In one conversation: a peer has two ports."""
MAX_AT_ONCE = 8
_CONVERSATIONS_PER_S, _CONVERSATIONS_AT_ONCE = 1 / 15, 8
"""Per host."""
_HELLO = Decoder(reach.Hello)
_QUESTION: Decoder[reach.Dial | reach.Speed] = Decoder(reach.Dial | reach.Speed)


class Reachability:
    """Answers such questions for one member. Used from one event loop."""

    def __init__(self, run_id: str, identity: Identity, transport: Transport, gate: Gate) -> None:
        self._run_id, self._transport, self._gate = run_id, transport, gate
        self._acceptor = Acceptor(Credentials.of(identity), allows=lambda _: False)
        self._conversations = RateLimits(_CONVERSATIONS_PER_S, _CONVERSATIONS_AT_ONCE)
        self._num_asking = 0
        self._is_measuring = False

    async def start(self) -> None:
        await self._transport.serve(reach.reach_protocol(self._run_id), self._asked)

    async def _asked(self, peer_id: str, sock: socket.socket) -> None:
        channel = Channel(sock, max_message_bytes=reach.MAX_MESSAGE_BYTES)
        self._num_asking += 1
        try:
            async with asyncio.timeout(COMMIT_S):
                hello = await channel.read(_HELLO, ANSWER_S)
                try:
                    self._gate.check(peer_id, hello.token, "door for questions")
                except Refused as error:
                    await channel.send_last(Refusal(why=error.why), ANSWER_S)
                    return
                caller = caller_of(await self._transport.addresses_of(peer_id))
                source = source_of(caller.host) if caller else "a third peer"
                if self._num_asking > MAX_AT_ONCE or not self._conversations.take(source, time.monotonic()):
                    await channel.send_last(reach.Busy(), ANSWER_S)
                    return
                host = caller.host if caller else ""
                await channel.send(reach.Here(host=host, time=time.time()), ANSWER_S)
                await self._answer(channel, peer_id, caller)
        finally:
            self._num_asking -= 1
            channel.close()

    async def _answer(self, channel: Channel, peer_id: str, caller: Maddr | None) -> None:
        """Answer questions until the caller closes the channel, which is the normal end."""
        num_dials, has_measured = 0, False
        while True:
            try:
                question = await channel.read(_QUESTION, COMMIT_S)
            except PeerUnreachable:
                return
            if isinstance(question, reach.Dial) and num_dials < MAX_DIALS:
                num_dials += 1
                error = await self._dial(peer_id, caller, question.port)
                await channel.send(reach.Dialled(error=error), ANSWER_S)
            elif isinstance(question, reach.Speed) and not has_measured:
                has_measured = True
                await self._measure(channel)
            else:
                raise ProtocolError(f"one question too many: {question!r:.80}")

    async def _dial(self, peer_id: str, caller: Maddr | None, port: int) -> str:
        """Why no peer with the caller's key answers at that port; empty if one does."""
        if caller is None:
            return "your connection comes through a third peer"
        endpoint = str(Maddr(caller.kind, caller.host, port, None))
        direct = Direct(self._acceptor, lambda _: (endpoint,))
        try:
            stream = await direct.open(peer_id, DIALLED_PROTOCOL, timeout_s=PROBE_S)
        except PeerUnreachable as error:
            return _plain(str(error))
        stream.close()
        return ""

    async def _measure(self, channel: Channel) -> None:
        if self._is_measuring:
            await channel.send(reach.Busy(), ANSWER_S)
            return
        self._is_measuring = True
        try:
            await send_bytes(channel)
            num_bytes, seconds = await receive_bytes(channel)
        finally:
            self._is_measuring = False
        await channel.send(reach.Took(num_bytes=num_bytes, seconds=seconds), ANSWER_S)


def caller_of(addresses: Iterable[str]) -> Maddr | None:
    """The address that the caller's connection comes from; none if all its connections are relayed."""
    for text in addresses:
        # A relayed connection has the relay's address, which must not be dialled for somebody else.
        if "p2p-circuit" in text:
            continue
        try:
            maddr = parse_maddr(text)
        except UserError:
            continue
        if maddr.kind in ("ip4", "ip6"):
            return maddr
    return None


def _plain(error: str) -> str:
    """A coarse reason: the answer must not tell what else listens there."""
    if "Errno 111" in error:
        return "connection refused"
    return "no answer in time" if "no answer in time" in error else "this machine does not answer there"
