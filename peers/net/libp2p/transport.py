"""Byte streams between peers, encrypted and authenticated by libp2p. To this process they are plain sockets."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from peers.errors import PeersError, PeerUnreachable
from peers.net.libp2p import p2pd_control
from peers.net.rate_limit import counted
from peers.net.socket_io import accept_forever
from peers.net.transport import Handler
from peers.protocol.maddrs import parse_maddr
from peers.tasks import Tasks
from peers.timing import RETRY_S

MAX_HANDLED_PER_PEER = 4
"""Handlers that run at once for the streams of one peer on one protocol; further streams are closed."""
_BACKLOG = 256
# If two peers dial each other at once, both dials fail, and so does a dial soon after a failed one; and a peer that has
# just joined is not yet known to all. None of these says that the peer is gone.
_PASSING_FAILURES = ("dial backoff", "routing: not found", "failed to find any peer", "failed to find peers")

logger = logging.getLogger(__name__)


class Transport:
    """Opens and accepts streams through one p2pd.

    A stream is a Unix socket that p2pd copies to and from the network. It has no half-close: closing either end ends
    both directions, after what was sent has been delivered. The only sign of a dead peer may be an empty read.
    """

    def __init__(self, control: Path, directory: Path) -> None:
        self._control = control
        self._directory = directory
        self._listeners: dict[Path, socket.socket] = {}
        self._tasks = Tasks()
        self._handled: Counter[str] = Counter()

    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket:
        """A non-blocking socket at the start of a new stream to a peer that serves `protocol`.

        `maddrs` are the peer's addresses, where known: without them libp2p's own DHT is asked. Raises
        PeerUnreachable.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                if maddrs:
                    await self.connect(peer_id, maddrs, timeout_s=left_s)
                return await p2pd_control.open_stream(self._control, peer_id, protocol, timeout_s=left_s)
            except PeerUnreachable as error:
                passing = any(text in str(error) for text in _PASSING_FAILURES)
                if not passing or time.monotonic() + RETRY_S > deadline:
                    raise PeerUnreachable(f"no {protocol} stream to {peer_id}: {error}") from error
            await asyncio.sleep(RETRY_S)

    async def connect(self, peer_id: str, maddrs: Sequence[str], *, timeout_s: float) -> None:
        """Have libp2p connect to this peer. Addresses of any other are ignored. Raises PeerUnreachable."""
        parsed = [parse_maddr(maddr) for maddr in maddrs]
        bare = [str(maddr).partition("/p2p/")[0] for maddr in parsed if maddr.peer_id in (None, peer_id)]
        await p2pd_control.connect(self._control, peer_id, bare, timeout_s=timeout_s)

    async def connected_peers(self) -> set[str]:
        """The ids of the peers that libp2p has a connection with."""
        return set(await p2pd_control.list_peers(self._control))

    async def addresses_of(self, peer_id: str) -> list[str]:
        """The addresses at the other ends of libp2p's connections with this peer."""
        return (await p2pd_control.list_peers(self._control)).get(peer_id, [])

    async def serve(self, protocol: str, handler: Handler) -> None:
        """From now on, call `handler(authenticated peer id, non-blocking socket)` for each new stream.

        The handler owns the socket from then on. What it raises is logged, and the socket closed.
        """
        path = self._directory / f"{secrets.token_hex(4)}.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners[path] = listener
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        await p2pd_control.accept_streams(self._control, protocol, path)

        def accepted(sock: socket.socket, _address: object) -> None:
            self._tasks.spawn(self._handle(sock, protocol, handler))

        self._tasks.spawn(accept_forever(listener, accepted, f"a {protocol} stream"))

    async def close(self) -> None:
        """Accept nothing more, and cancel the handlers that still run. Streams stay with their owners."""
        await self._tasks.close()
        for path, listener in self._listeners.items():
            listener.close()
            path.unlink(missing_ok=True)
        self._listeners.clear()

    async def _handle(self, sock: socket.socket, protocol: str, handler: Handler) -> None:
        try:
            peer_id = await p2pd_control.read_stream_info(sock)
            with counted(self._handled, f"{peer_id} {protocol}", MAX_HANDLED_PER_PEER):
                await handler(peer_id, sock)
        except (PeersError, OSError, TimeoutError) as error:
            sock.close()
            logger.info("a %s stream ended: %s", protocol, error)
        except BaseException:
            sock.close()
            raise
