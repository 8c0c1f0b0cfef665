"""The interface of what opens and accepts streams between peers."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

Handler = Callable[[str, socket.socket], Awaitable[None]]
"""Called with the authenticated id of the peer at the other end, and a non-blocking socket, which it then owns."""


class StreamTransport(Protocol):
    """Implemented by Paths, which choose a transport, and by the transports direct.py and libp2p/transport.py."""

    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket:
        """A non-blocking socket at the start of a new stream. Raises PeerUnreachable."""
        ...

    async def serve(self, protocol: str, handler: Handler) -> None:
        """From now on, call the handler for each new stream."""
        ...


class Libp2p(StreamTransport, Protocol):
    """The streams of libp2p, and the peers that it is connected to."""

    async def connected_peers(self) -> set[str]: ...
