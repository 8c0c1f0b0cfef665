"""Copies bytes between pairs of sockets in a thread of its own, so that the daemon's event loop is not held up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from peers.errors import PeerUnreachable
from peers.tasks import cancelled
from peers.timing import STOP_S

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 15
"""Per direction of a stream. A larger one makes no stream faster; with half of it a stream takes twice as long. Further
bytes wait in the sockets, which holds back the sender."""


class Forwarder:
    """`forward` and `close` are called from one thread; copying runs in a thread of this object."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.num_bytes = 0
        """Bytes copied so far, over all streams; never decreases."""

    def forward(self, one: socket.socket, other: socket.socket, on_end: Callable[[], object]) -> None:
        """Own both sockets from now on, until either ends; then close them and call `on_end`, in the copying thread.

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
        """Cut all streams, and end the thread. May be repeated."""
        self._is_closed = True
        if self._loop is None or self._thread is None:
            return
        loop, self._loop = self._loop, None
        asyncio.run_coroutine_threadsafe(self._stop(), loop).result(STOP_S)
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(STOP_S)
        loop.close()

    async def _stop(self) -> None:
        await cancelled(self._tasks)

    def _begin(self, one: socket.socket, other: socket.socket, on_end: Callable[[], object]) -> None:
        async def forward() -> None:
            directions = {asyncio.ensure_future(self._copy(*pair)) for pair in ((one, other), (other, one))}
            try:
                # Neither end supports half-close, so the end of one direction ends both.
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for outcome in await cancelled(directions):
                    if outcome is not None and not isinstance(outcome, OSError | asyncio.CancelledError):
                        log.error("forwarding failed", exc_info=outcome)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            one.close()
            other.close()
            # The callback's owner and its event loop may be gone.
            with contextlib.suppress(RuntimeError):
                on_end()

        task = asyncio.get_running_loop().create_task(forward())
        self._tasks.add(task)
        task.add_done_callback(end)

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        buffer = memoryview(bytearray(BUFFER_BYTES))
        source.setblocking(False)
        target.setblocking(False)
        while num_bytes := await loop.sock_recv_into(source, buffer):
            await loop.sock_sendall(target, buffer[:num_bytes])
            self.num_bytes += num_bytes
            # Reading what has already arrived does not yield to other streams.
            await asyncio.sleep(0)
