"""Connections over TCP and through relays: greeted within limits, then handed to their protocol's handler.

A connection costs little until it has shown the certificate of an admitted peer, and has a deadline for that. The
number of connections is limited by source address, by claimed identity, and in all.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable

from peers.errors import PeersError, PeerUnreachable, ProtocolError
from peers.net.paths import greeting
from peers.net.paths.greeting import Hello
from peers.net.paths.tls import Credentials
from peers.net.rate_limit import RateLimits, counted
from peers.net.socket_io import closed_on_error
from peers.net.transport import Handler
from peers.timing import CONNECT_S

log = logging.getLogger(__name__)

MAX_SILENT = 128
"""Connections that have not shown a certificate yet. When there are more, the oldest is closed."""
MAX_PER_SOURCE = 32
"""Connections from one address, or through one relay, that are not yet handed over: a machine may hold many peers."""
MAX_PER_PEER = 4
"""Greetings at once by one claimed identity from one source; streams of one peer that one handler works on."""
GREETINGS_PER_S, GREETINGS_AT_ONCE = 50.0, 200.0
"""Per source. A handshake takes a millisecond of the event loop, also for a caller that shows somebody else's
certificate.
"""


class Acceptor:
    """Used from one event loop. Streams are non-blocking sockets, with TLS unless both ends accept plain TCP.

    `allows` decides by peer id who may call; `plain`: this peer accepts plain TCP.
    """

    def __init__(
        self, credentials: Credentials, *, allows: Callable[[str], bool], plain: bool = False
    ) -> None:
        self.credentials = credentials
        self._allows, self._plain = allows, plain
        self._handlers: dict[str, Handler] = {}
        self._silent: dict[asyncio.Task[None] | None, None] = {}
        self._from: Counter[str] = Counter()
        self._of: Counter[str] = Counter()
        self._greetings = RateLimits(GREETINGS_PER_S, GREETINGS_AT_ONCE)

    def serve(self, protocol: str, handler: Handler) -> None:
        """From now on, `handler(peer id, stream)` owns each new stream on this protocol."""
        self._handlers[protocol] = handler

    async def call(
        self, sock: socket.socket, peer_id: str, protocol: str, *, timeout_s: float, plain: bool | None = None
    ) -> socket.socket:
        """A stream with this peer over a connected socket, which is taken over.

        Raises PeerUnreachable, or ProtocolError where somebody else answers.
        """
        plain = self._plain if plain is None else plain
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                return await greeting.call(sock, self.credentials, peer_id, protocol, plain=plain)
        except TimeoutError as error:
            raise PeerUnreachable("no answer in time") from error

    async def receive(
        self,
        sock: socket.socket,
        *,
        source: str,
        expected: str | None = None,
        plain: bool | None = None,
        strangers: bool = False,
    ) -> None:
        """Greet whoever has connected from `source`, and hand the stream over. Owns the socket; raises nothing.

        `expected`: the only peer that may call; `strangers`: peers that `allows` rejects may call too.
        """
        plain = self._plain if plain is None else plain
        sock.setblocking(False)
        try:
            with counted(self._from, source, MAX_PER_SOURCE):
                async with asyncio.timeout(CONNECT_S):
                    hello = await self._hello(sock)
                    self._check(hello.peer_id, expected, strangers)
                    if not self._greetings.take(source, time.monotonic()):
                        raise ProtocolError("too many greetings from this address")
                    # By source too: a caller's certificate can be replayed by any peer that it has called.
                    with counted(self._of, f"{source} {hello.peer_id}", MAX_PER_PEER):
                        stream, protocol = await greeting.answer(
                            sock, self.credentials, hello, plain=plain, serves=self._handlers.__contains__
                        )
            await self._hand_over(hello.peer_id, protocol, stream)
        except (PeersError, OSError) as error:
            sock.close()
            log.debug("a connection from %s came to nothing: %s", source, error)
        except BaseException:
            sock.close()
            raise

    async def _hello(self, sock: socket.socket) -> Hello:
        while len(self._silent) >= MAX_SILENT:
            oldest = next(iter(self._silent))
            self._silent.pop(oldest)
            if oldest is not None:
                oldest.cancel()
        task = asyncio.current_task()
        self._silent[task] = None
        try:
            return await greeting.read_hello(sock)
        finally:
            self._silent.pop(task, None)

    def _check(self, peer_id: str, expected: str | None, strangers: bool) -> None:
        if peer_id == self.credentials.peer_id or expected not in (None, peer_id):
            raise ProtocolError(f"it claims to be {peer_id}, which it cannot be")
        if not strangers and not self._allows(peer_id):
            raise ProtocolError(f"{peer_id} is no peer of this run")

    async def _hand_over(self, peer_id: str, protocol: str, stream: socket.socket) -> None:
        with closed_on_error(stream), counted(self._of, f"{peer_id} {protocol}", MAX_PER_PEER):
            await self._handlers[protocol](peer_id, stream)
