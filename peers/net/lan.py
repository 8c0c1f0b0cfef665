"""Members of a run on the same network, found without an address: UDP multicast that no router forwards.

It only gives addresses. Whoever answers may be anybody; who may join, and whom to believe, is decided as always.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from msgspec.msgpack import Decoder

from peers.errors import ProtocolError, UserError
from peers.net.rate_limit import RateLimit
from peers.protocol.lan import LAN_GROUP, LAN_PORT, MAX_LAN_BYTES, AskLan, HereOnLan
from peers.protocol.maddrs import Maddr, is_loopback, is_peer_id, parse_maddr
from peers.protocol.wire import decode, encode
from peers.timing import ANSWER_S, GRACE_S, OFTEN_S

ASK_TIMEOUT_S = ANSWER_S
_AGAIN_S = OFTEN_S
"""Datagrams get lost."""
_MORE_S = GRACE_S
"""For others, once one has answered."""
_MOST_FOUND = 8
_ANSWERS_PER_S, _ANSWERS_AT_ONCE = 5.0, 20.0
_ASKED = Decoder(AskLan)
_ANSWERED = Decoder(HereOnLan)

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def answering(run_id: str, maddrs: Sequence[str]) -> AsyncIterator[None]:
    """While the block runs, newcomers on this network are told of the member that listens on `maddrs`.

    Raises UserError where it listens on nothing that others could reach, or the port is taken.
    """
    reached = [maddr for maddr in map(parse_maddr, maddrs) if maddr.kind == "ip4" and not is_loopback(maddr)]
    if not reached or reached[0].peer_id is None:
        raise UserError(
            "--discover: nobody on this network could reach what this machine listens on; give "
            "--host-maddrs /ip4/0.0.0.0/tcp/0"
        )
    here = HereOnLan(run_id=run_id, peer_id=reached[0].peer_id, port=reached[0].port)
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Answering(here), sock=_listening_socket()
    )
    try:
        yield
    finally:
        transport.close()


def found_here(run_id: str, timeout_s: float = ASK_TIMEOUT_S) -> list[str]:
    """Addresses of members of the run that answer on this network; none: nobody does. Takes a second, or the time."""
    found: dict[str, None] = {}
    ask = _padded(run_id)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        deadline, ask_at = time.monotonic() + timeout_s, 0.0
        while (now := time.monotonic()) < deadline and len(found) < _MOST_FOUND:
            if now >= ask_at:
                _send_on_all(sock, ask)
                ask_at = now + _AGAIN_S
            if select.select([sock], [], [], max(0.0, min(deadline, ask_at) - now))[0]:
                data, (host, _) = sock.recvfrom(MAX_LAN_BYTES + 1)
                if (maddr := _answer(data, host, run_id)) is not None:
                    deadline = deadline if found else min(deadline, time.monotonic() + _MORE_S)
                    found[str(maddr)] = None
    return list(found)


class _Answering(asyncio.DatagramProtocol):
    def __init__(self, here: HereOnLan) -> None:
        self._here, self._limit = here, RateLimit(_ANSWERS_PER_S, _ANSWERS_AT_ONCE)
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = encode(self._here)
        with contextlib.suppress(ProtocolError):
            asked = decode(_ASKED, data, MAX_LAN_BYTES)
            is_ours = asked.run_id == self._here.run_id and len(answer) <= len(data)
            if is_ours and self._limit.take(time.monotonic()):
                assert self._transport is not None
                self._transport.sendto(answer, addr)

    def error_received(self, exc: Exception) -> None:
        log.debug("an answer on the local network did not go out: %s", exc)


def _answer(data: bytes, host: str, run_id: str) -> Maddr | None:
    """What an answer means; none where it means nothing to this run."""
    with contextlib.suppress(ProtocolError):
        here = decode(_ANSWERED, data, MAX_LAN_BYTES)
        if here.run_id == run_id and is_peer_id(here.peer_id):
            return Maddr("ip4", host, here.port, here.peer_id)
    return None


def _padded(run_id: str) -> bytes:
    bare = len(encode(AskLan(run_id=run_id)))
    # A longer string has a longer header.
    return encode(AskLan(run_id=run_id, padding=" " * (MAX_LAN_BYTES - bare - 4)))


def _listening_socket() -> socket.socket:
    """Raises UserError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        # Several peers on one machine all hear what is asked.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LAN_GROUP, LAN_PORT))
        for member in _memberships():
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
    except OSError as error:
        sock.close()
        raise UserError(f"--discover cannot listen on UDP port {LAN_PORT}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _send_on_all(sock: socket.socket, data: bytes) -> None:
    """From every interface: which of them the others are on, nobody knows."""
    for member in _memberships():
        # One that is down, or speaks no IPv4.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, member)
            sock.sendto(data, (LAN_GROUP, LAN_PORT))


def _memberships() -> Iterator[bytes]:
    """`struct ip_mreqn` of the group on every interface."""
    for index, _ in socket.if_nameindex():
        yield struct.pack("=4s4si", socket.inet_aton(LAN_GROUP), bytes(4), index)
