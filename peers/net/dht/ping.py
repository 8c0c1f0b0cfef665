"""Is a peer there? Asked directly, because the DHT takes seconds to forget the dead."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from peers.errors import PeerUnreachable

if TYPE_CHECKING:
    from peers.net.libp2p.transport import Transport

_PROTOCOL = "diloco/ping"
_ANSWER = b"\x01"
_SEND_TIMEOUT_S = 5.0


async def serve_ping(transport: Transport) -> None:
    """Answer every ping from now on."""
    await transport.serve(_PROTOCOL, _answer)


async def ping(transport: Transport, peer_id: str, *, timeout_s: float, maddrs: Sequence[str] = ()) -> bool:
    """Whether the process that holds this identity answers within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    try:
        sock = await transport.open(peer_id, _PROTOCOL, timeout_s=timeout_s, maddrs=maddrs)
    except PeerUnreachable:
        return False
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await asyncio.get_running_loop().sock_recv(sock, 1) == _ANSWER
    except (TimeoutError, OSError):
        return False
    finally:
        sock.close()


async def _answer(_peer_id: str, sock: socket.socket) -> None:
    try:
        async with asyncio.timeout(_SEND_TIMEOUT_S):
            await asyncio.get_running_loop().sock_sendall(sock, _ANSWER)
    finally:
        sock.close()
