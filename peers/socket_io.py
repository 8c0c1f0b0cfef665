"""Stream sockets in an event loop, whether TLS is on them or not.

asyncio refuses an SSLSocket. Here it is used as it is: non-blocking, by one thread, so that the same socket can go to a
thread of the reduction and come back.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Between 1 and `num_bytes` bytes, not one more is taken; none at the end of the stream. Raises OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        return await asyncio.get_running_loop().sock_recv(sock, num_bytes)
    return await _once_ready(sock, lambda: sock.recv(num_bytes))


async def receive_into(sock: socket.socket, buffer: memoryview) -> int:
    """The same, to the beginning of `buffer`; how many bytes there are."""
    if not isinstance(sock, ssl.SSLSocket):
        return await asyncio.get_running_loop().sock_recv_into(sock, buffer)
    return await _once_ready(sock, lambda: sock.recv_into(buffer))


async def send_all(sock: socket.socket, data: bytes | memoryview) -> None:
    """Send every byte. Raises OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        await asyncio.get_running_loop().sock_sendall(sock, data)
        return
    view = memoryview(data)
    while view:
        # Bound now: what OpenSSL could not finish has to be offered again as it was.
        sent = await _once_ready(sock, lambda view=view: sock.send(view))  # type: ignore[misc]
        view = view[sent:]


def is_silent(sock: socket.socket) -> bool:
    """Whether a stream stands on which the other end never sends: anything to read there is its end."""
    if sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)


async def _once_ready(sock: ssl.SSLSocket, attempt: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    while True:
        try:
            return attempt()
        except ssl.SSLWantReadError:
            await _event(sock, loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
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
