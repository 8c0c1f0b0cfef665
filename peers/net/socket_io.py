"""Stream sockets in an event loop, with TLS or without.

The sockets themselves are used: non-blocking, by one thread at a time, so that one can go to a thread of the reduction
and come back. asyncio's own calls refuse TLS sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from peers.timing import RETRY_S

T = TypeVar("T")

log = logging.getLogger(__name__)


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


@contextlib.contextmanager
def closed_on_error(opened: C) -> Iterator[C]:
    """Close `opened` if the block ends by an error or a cancellation; otherwise it stays with its owner."""
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


async def accept_forever(
    listener: socket.socket, accepted: Callable[[socket.socket, Any], object], what: str
) -> None:
    """Call `accepted` with every connection and the address that it comes from."""
    while True:
        accepted(*await accept_next(listener, what))


async def accept_next(listener: socket.socket, what: str) -> tuple[socket.socket, Any]:
    """The next connection, and the address that it comes from."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock, address = await loop.sock_accept(listener)
        except OSError as error:
            # Most likely there are no descriptors left; later there may be some.
            log.warning("cannot accept %s: %s", what, error)
            await asyncio.sleep(RETRY_S)
            continue
        sock.setblocking(False)
        return sock, address


async def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Between 1 and `num_bytes` bytes; empty at the end of the stream. Raises OSError. If cancelled, nothing was
    read.
    """
    return await once_ready(sock, lambda: sock.recv(num_bytes), select.POLLIN)


async def receive_into(sock: socket.socket, buffer: memoryview) -> int:
    """As `receive`, into the start of `buffer`; returns how many bytes."""
    return await once_ready(sock, lambda: sock.recv_into(buffer), select.POLLIN)


async def receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Raises OSError, also if the stream ends before."""
    received = b""
    while len(received) < num_bytes:
        piece = await receive(sock, num_bytes - len(received))
        if not piece:
            raise ConnectionResetError("closed in mid-message")
        received += piece
    return received


async def send_all(sock: socket.socket, data: bytes | memoryview) -> None:
    """Send every byte. Raises OSError."""
    view = memoryview(data)
    while view:
        # `view` is bound now: OpenSSL must be offered again the same bytes that it could not send.
        sent = await once_ready(sock, lambda view=view: sock.send(view), select.POLLOUT)  # type: ignore[misc]
        view = view[sent:]


async def once_ready(sock: socket.socket, attempt: Callable[[], T], event: int) -> T:
    """Repeat `attempt` until it does not block; returns its result. `event`: what to wait for, unless TLS tells.

    Not asyncio's own calls: they take bytes before the caller runs again, and lose them if it is cancelled just then.
    """
    loop = asyncio.get_running_loop()
    if isinstance(sock, ssl.SSLSocket):
        # Many small records may arrive, each ready at once: yield to other tasks.
        await asyncio.sleep(0)
    while True:
        try:
            return attempt()
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        except BlockingIOError:
            pass
        if event == select.POLLIN:
            await _event(sock, loop.add_reader, loop.remove_reader)
        else:
            await _event(sock, loop.add_writer, loop.remove_writer)


async def _event(sock: socket.socket, add: Callable[..., object], remove: Callable[[int], object]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    descriptor = sock.fileno()
    if descriptor < 0:
        raise OSError("the stream is closed")

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(descriptor, set_ready)
    try:
        await ready
    finally:
        remove(descriptor)
