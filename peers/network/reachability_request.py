"""Asking a member of the swarm what a machine cannot see of itself, and what both sides may say.

    caller                                 asked      (protocol diloco/<run_id>/reach)
    {kind: "hello", token}        ->
                                  <-       {kind: "here", host, time} | {kind: "refused", why} | {kind: "busy"}
    {kind: "dial", port}          ->
                                  <-       {kind: "dialled", error}
    {kind: "speed"}               ->
                                  <-       {kind: "bytes", data}... {kind: "mark"}     | {kind: "busy"}
    {kind: "got"}                 ->                            again, twice as many, or {kind: "end"}
    the same the other way round
                                  <-       {kind: "took", num_bytes, seconds}

No request holds an address: what is dialled is the host that the caller's own connection comes from. On the port it has
to answer with the caller's key (peers/network/greeting.py), so "reached" means that this machine was.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from peers import checked_values as checked
from peers.access.request import raise_refusal
from peers.errors import PeerUnreachable, ProtocolError
from peers.messages import Channel

if TYPE_CHECKING:
    from peers.transport import Transport

ANSWER_TIMEOUT_S = 5.0
DIAL_TIMEOUT_S = 4.0
SPEED_S = 1.0
"""A measurement of speed ends with the first burst that took longer, in each direction."""
CHUNK_BYTES = 32 << 10
BURSTS = tuple(4 << power for power in range(6))
"""In chunks, each when the one before has arrived: a slow link is not given more than it carries in a few seconds."""
SPEED_BYTES = sum(BURSTS) * CHUNK_BYTES
BURST_TIMEOUT_S = 15.0
MAX_MESSAGE_BYTES = CHUNK_BYTES + 1024
DIALLED_PROTOCOL = "diloco/reached"
"""What the asked peer asks for when it calls back."""
_MAX_TEXT_CHARACTERS = 200


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
        await self._channel.send({"kind": "dial", "port": port}, ANSWER_TIMEOUT_S)
        answer = await self._channel.receive(ANSWER_TIMEOUT_S + DIAL_TIMEOUT_S)
        return _text_of(answer, "dialled", "error")

    async def speed(self) -> Speed:
        """Move some megabytes both ways."""
        await self._channel.send({"kind": "speed"}, ANSWER_TIMEOUT_S)
        num_bytes, seconds = await receive_bytes(self._channel)
        await send_bytes(self._channel)
        took = await self._channel.receive(ANSWER_TIMEOUT_S)
        if (
            took.get("kind") != "took"
            or not _is_real(took.get("num_bytes"))
            or not _is_real(took.get("seconds"))
        ):
            raise ProtocolError(f"not what it took: {took!r:.80}")
        return Speed(rate(took["num_bytes"], took["seconds"]), rate(num_bytes, seconds))


@contextlib.asynccontextmanager
async def asking(
    transport: Transport,
    peer_id: str,
    run_id: str,
    *,
    token: bytes = b"",
    maddrs: Sequence[str] = (),
    timeout_s: float = ANSWER_TIMEOUT_S,
    clock: Callable[[], float] = time.time,
) -> AsyncIterator[Asked]:
    """Begin to ask a member. Raises PeerUnreachable where it does not answer, Refused where it does not want to."""
    sock = await transport.open(peer_id, reach_protocol(run_id), timeout_s=timeout_s, maddrs=maddrs)
    channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
    try:
        began, before = time.monotonic(), clock()
        await channel.send({"kind": "hello", "token": token}, timeout_s)
        answer = await channel.receive(timeout_s)
        round_trip_s = time.monotonic() - began
        host, peer_time = _host_of(answer), answer.get("time")
        if not _is_real(peer_time):
            raise ProtocolError("it does not say what time it is")
        yield Asked(channel, Here(host, before + round_trip_s / 2 - peer_time, round_trip_s))
    finally:
        channel.close()


def reach_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/reach"


async def send_bytes(channel: Channel) -> None:
    """Larger and larger bursts, until one takes long."""
    chunk = {"kind": "bytes", "data": bytes(CHUNK_BYTES)}
    for num_chunks in BURSTS:
        began = time.monotonic()
        for _ in range(num_chunks):
            await channel.send(chunk, BURST_TIMEOUT_S)
        await channel.send({"kind": "mark"}, BURST_TIMEOUT_S)
        if await channel.receive(BURST_TIMEOUT_S) != {"kind": "got"}:
            raise ProtocolError("the bytes were not acknowledged")
        if time.monotonic() - began > SPEED_S:
            break
    await channel.send({"kind": "end"}, ANSWER_TIMEOUT_S)


async def receive_bytes(channel: Channel) -> tuple[int, float]:
    """Of the last burst, how many came after its first chunk, and how long they took."""
    measured = 0, 0.0
    arrivals: list[float] = []
    total_bytes = 0
    while True:
        message = await channel.receive(BURST_TIMEOUT_S)
        kind, data = message.get("kind"), message.get("data")
        if kind == "end":
            return measured
        if kind == "busy":
            raise Busy("it measures another link just now")
        if kind == "mark" and arrivals:
            measured = (len(arrivals) - 1) * CHUNK_BYTES, arrivals[-1] - arrivals[0]
            arrivals = []
            await channel.send({"kind": "got"}, ANSWER_TIMEOUT_S)
        elif kind == "bytes" and isinstance(data, bytes) and len(data) == CHUNK_BYTES:
            arrivals.append(time.monotonic())
            total_bytes += len(data)
        else:
            raise ProtocolError(f"expected bytes, got {kind!r:.40}")
        if total_bytes > SPEED_BYTES:
            raise ProtocolError(f"more than {SPEED_BYTES} bytes")


def rate(num_bytes: float, seconds: float) -> float:
    """Bytes/s; 0: too few to tell."""
    return num_bytes / seconds if seconds > 0 else 0.0


def _text_of(message: dict[str, Any], kind: str, name: str) -> str:
    raise_refusal(message)
    if message.get("kind") == "busy":
        raise Busy("it has answered many such questions lately; ask again in a minute")
    if message.get("kind") != kind:
        raise ProtocolError(f"expected {kind}, got {message.get('kind')!r:.40}")
    return checked.text(message.get(name), _MAX_TEXT_CHARACTERS)


def _host_of(message: dict[str, Any]) -> str:
    """An IP address, or nothing: no name that would be looked up."""
    host = _text_of(message, "here", "host")
    try:
        return str(ipaddress.ip_address(host)) if host else ""
    except ValueError as error:
        raise ProtocolError(f"no IP address: {host!r:.80}") from error


def _is_real(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and 0 <= value < 1e15
