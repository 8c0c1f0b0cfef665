"""What the other paths build on: the part of peers/net/libp2p/transport.py that they need."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Protocol

from peers.net.paths.acceptor import Handler


class Libp2p(Protocol):
    """Streams of libp2p, and whom it is connected with."""

    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket: ...

    async def serve(self, protocol: str, handler: Handler) -> None: ...

    async def connected_peers(self) -> set[str]: ...
