"""Where connections of our own begin and end up: greeted in threads, within bounds, then handed to their handlers.

Whoever connects costs little until he has shown the certificate of a peer that is allowed here, and has a deadline for
that; what he may occupy then is bounded by where he comes from, by whom he claims to be, and in all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from peers.errors import PeersError, PeerUnreachable, ProtocolError
from peers.net.paths import greeting
from peers.net.paths.greeting import Hello
from peers.net.paths.tls import Credentials

log = logging.getLogger(__name__)

Handler = Callable[[str, socket.socket], Awaitable[None]]
T = TypeVar("T")

MAX_SILENT = 128
"""Connections that have not yet shown a certificate; of more, the oldest gives way."""
MAX_PER_SOURCE = 32
"""Connections from one address, or through one relay, that are not yet handed over: a machine may hold many peers."""
MAX_PER_PEER = 4
"""Greetings at once with who claims, from one source, to be one peer; streams of one peer that one handler works on."""
HELLO_TIMEOUT_S = 5.0
GREETING_TIMEOUT_S = 10.0
_MAX_THREADS = 16
MAX_ANSWERED_PER_SOURCE = _MAX_THREADS // 2
"""Greetings from one source that take a thread at once; further ones wait. Who stops in the middle keeps his long."""


class Reception:
    """Used from one event loop. Streams are non-blocking sockets, of TLS where not both ends do without.

    `allows` says of a peer id whether it may call; `plain`, whether plain TCP will do for this peer.
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
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        # Of their own each: neither may the calls of others hold up ours, nor both the reduction's threads.
        self._calls = ThreadPoolExecutor(_MAX_THREADS, "call")
        self._answers = ThreadPoolExecutor(_MAX_THREADS, "answer")

    def serve(self, protocol: str, handler: Handler) -> None:
        """From now on, `handler(peer id, stream)` owns each new stream on this protocol."""
        self._handlers[protocol] = handler

    async def call(
        self, sock: socket.socket, peer_id: str, protocol: str, *, timeout_s: float, plain: bool | None = None
    ) -> socket.socket:
        """A stream with this peer over a connected socket, which is taken over.

        Raises PeerUnreachable, or ProtocolError where somebody else answers.
        """
        deadline = time.monotonic() + timeout_s
        plain = self._plain if plain is None else plain
        stream = await _in_thread(
            self._calls,
            sock,
            lambda: greeting.call(sock, self.credentials, peer_id, protocol, plain=plain, deadline=deadline),
            lambda outcome: outcome,
        )
        stream.setblocking(False)
        return stream

    async def receive(
        self,
        sock: socket.socket,
        *,
        source: str,
        expected: str | None = None,
        plain: bool | None = None,
        strangers: bool = False,
        on_greeted: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Greet whoever has connected from `source`, and see to what he wants. Takes the socket over; raises nothing.

        `expected`: the only peer it may be; `strangers`: whether those may call too that are not allowed otherwise;
        `on_greeted` hears who has proved to be whom he claims to be.
        """
        try:
            with _counted(self._from, source, MAX_PER_SOURCE):
                hello = await self._hello(sock, expected, strangers)
                # By source too: whoever this peer has called can show its certificate, and stop there.
                with _counted(self._of, f"{source} {hello.peer_id}", MAX_PER_PEER):
                    stream, protocol = await self._answer(
                        sock, source, hello, self._plain if plain is None else plain
                    )
            on_greeted(hello.peer_id)
            await self._hand_over(hello.peer_id, protocol, stream)
        except (PeersError, OSError, TimeoutError) as error:
            sock.close()
            log.debug("a connection from %s came to nothing: %s", source, error)
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        """Greet nobody any more. Cancel what calls and receives first."""
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._answers.shutdown(wait=False, cancel_futures=True)

    async def _hello(self, sock: socket.socket, expected: str | None, strangers: bool) -> Hello:
        while len(self._silent) >= MAX_SILENT:
            oldest = next(iter(self._silent))
            self._silent.pop(oldest)
            if oldest is not None:
                oldest.cancel()
        task = asyncio.current_task()
        self._silent[task] = None
        try:
            sock.setblocking(False)
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await greeting.read_hello(sock)
        finally:
            self._silent.pop(task, None)
        peer_id = hello.peer_id
        if peer_id == self.credentials.peer_id or expected not in (None, peer_id):
            raise ProtocolError(f"it claims to be {peer_id}, which it cannot be")
        if not strangers and not self._allows(peer_id):
            raise ProtocolError(f"{peer_id} is no peer of this run")
        return hello

    async def _answer(
        self, sock: socket.socket, source: str, hello: Hello, plain: bool
    ) -> tuple[socket.socket, str]:
        deadline = time.monotonic() + GREETING_TIMEOUT_S
        turn = self._turns.setdefault(source, asyncio.Semaphore(MAX_ANSWERED_PER_SOURCE))
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            await turn.acquire()
        try:
            return await _in_thread(
                self._answers,
                sock,
                lambda: greeting.answer(
                    sock,
                    self.credentials,
                    hello,
                    plain=plain,
                    serves=self._handlers.__contains__,
                    deadline=deadline,
                ),
                lambda outcome: outcome[0],
            )
        finally:
            turn.release()

    async def _hand_over(self, peer_id: str, protocol: str, stream: socket.socket) -> None:
        stream.setblocking(False)
        try:
            with _counted(self._of, f"{peer_id} {protocol}", MAX_PER_PEER):
                await self._handlers[protocol](peer_id, stream)
        except BaseException:
            stream.close()
            raise


@contextlib.contextmanager
def _counted(counter: Counter[str], key: str, limit: int) -> Iterator[None]:
    """Counts who is inside. Raises ProtocolError where that would be more than `limit`."""
    if counter[key] >= limit:
        raise ProtocolError(f"{limit} connections of {key} are being worked on already")
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]


async def _in_thread(
    threads: ThreadPoolExecutor,
    sock: socket.socket,
    job: Callable[[], T],
    stream_of: Callable[[T], socket.socket],
) -> T:
    """`job`, which has the socket; cancelled, the job ends too, and what it had made is closed."""

    def drop(future: Future[T]) -> None:
        if future.cancelled():
            sock.close()
        elif future.exception() is None:
            stream_of(future.result()).close()

    try:
        # The socket may become another object in there; this handle stays ours.
        breaker = sock.dup()
    except OSError as error:
        sock.close()
        raise PeerUnreachable(f"no descriptor left for a greeting: {error.strerror}") from error
    with breaker:
        future = threads.submit(job)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                breaker.shutdown(socket.SHUT_RDWR)
            future.add_done_callback(drop)
            raise
