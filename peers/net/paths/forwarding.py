"""Copies bytes between pairs of sockets in a thread of its own, so that the daemon's event loop never waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

from peers.errors import PeerUnreachable

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 17
"""Per direction; what does not fit waits in the sockets, and holds back the sender."""
IDLE_TIMEOUT_S = 900.0
"""A stream that moves no byte for so long is broken off: its ends may open another."""
_STOP_TIMEOUT_S = 5.0


class Forwarder:
    """`forward` and `close` are called from one thread; the copying is this object's own."""

    def __init__(self, idle_timeout_s: float = IDLE_TIMEOUT_S) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.num_bytes = 0
        """Carried so far, of all streams; only ever grows."""

    def forward(self, one: socket.socket, other: socket.socket, on_end: Callable[[], object]) -> None:
        """Own both sockets from now on, until either ends; then close them and call `on_end`, in that thread.

        Raises PeerUnreachable when closed already.
        """
        if self._is_closed:
            raise PeerUnreachable("this peer forwards nothing any more")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="forward", daemon=True)
            self._thread.start()
        self._loop.call_soon_threadsafe(self._begin, one, other, on_end)

    def close(self) -> None:
        """Break everything off, and end the thread. May be repeated."""
        self._is_closed = True
        if self._loop is None or self._thread is None:
            return
        loop, self._loop = self._loop, None
        asyncio.run_coroutine_threadsafe(self._stop(), loop).result(_STOP_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        loop.close()

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, one: socket.socket, other: socket.socket, on_end: Callable[[], object]) -> None:
        task = asyncio.get_running_loop().create_task(
            _Forwarded(one, other, self._count).run(self._idle_timeout_s)
        )
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            one.close()
            other.close()
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("forwarding failed", exc_info=error)
            # Its owner may be gone, and its event loop with it.
            with contextlib.suppress(RuntimeError):
                on_end()

        task.add_done_callback(end)


class _Forwarded:
    """One stream, both directions."""

    def __init__(self, one: socket.socket, other: socket.socket, count: Callable[[int], None]) -> None:
        self._one, self._other, self._count = one, other, count
        self._moved_at = time.monotonic()

    async def run(self, idle_timeout_s: float) -> None:
        directions = {
            asyncio.ensure_future(self._copy(self._one, self._other)),
            asyncio.ensure_future(self._copy(self._other, self._one)),
        }
        pending = directions
        try:
            # Neither end can close half of a stream, so the end of one direction is that of both.
            while len(pending) == len(directions) and time.monotonic() - self._moved_at < idle_timeout_s:
                _, pending = await asyncio.wait(
                    directions, timeout=idle_timeout_s / 2, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for direction in directions:
                direction.cancel()
            for outcome in await asyncio.gather(*directions, return_exceptions=True):
                if outcome is not None and not isinstance(outcome, OSError | asyncio.CancelledError):
                    raise outcome

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        buffer = memoryview(bytearray(BUFFER_BYTES))
        source.setblocking(False)
        target.setblocking(False)
        while num_bytes := await loop.sock_recv_into(source, buffer):
            await loop.sock_sendall(target, buffer[:num_bytes])
            self._moved_at = time.monotonic()
            self._count(num_bytes)
            # Reading what is there already does not let any other stream move.
            await asyncio.sleep(0)
