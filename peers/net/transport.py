"""What opens and accepts streams between peers, as far as those who use streams need to know."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

Handler = Callable[[str, socket.socket], Awaitable[None]]
"""Called with the authenticated id of the peer at the other end and a non-blocking socket, which it owns."""


class StreamTransport(Protocol):
    """Paths, which choose among all ways to a peer, or one of these ways: direct.py, libp2p/transport.py."""

    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket:
        """A non-blocking socket at the start of a new stream. Raises PeerUnreachable."""
        ...

    async def serve(self, protocol: str, handler: Handler) -> None:
        """From now on, call the handler for each new stream."""
        ...


class Libp2p(StreamTransport, Protocol):
    """libp2p's streams, and whom it is connected with."""

    async def connected_peers(self) -> set[str]: ...
