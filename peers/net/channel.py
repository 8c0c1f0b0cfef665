"""Small messages between peers: structs of peers/protocol behind a 4-byte length, on a stream of the transport.

Between two messages either end may send raw bytes, if the messages before say how many.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

from msgspec.msgpack import Decoder

from peers.errors import PeerSilent, PeerUnreachable, ProtocolError
from peers.net import socket_io
from peers.net.transport import StreamTransport
from peers.protocol.wire import Struct, decode, encode
from peers.timing import OFTEN_S

MAX_MESSAGE_BYTES = 1 << 20
T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_TIMED_BYTES = 64 << 10
"""TLS tells only of a whole piece that it has been sent."""


class Channel:
    """Messages over a non-blocking socket, TLS or plain. One task may send while another receives.

    The channel owns the socket. A context manager: leaving it closes both.
    """

    def __init__(self, sock: socket.socket, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._max_message_bytes = max_message_bytes
        self._sending = asyncio.Lock()
        self._received = bytearray()
        self.received_bytes = 0
        """Of whole messages."""
        self.sent_bytes = 0
        """Of raw bytes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def send(self, message: Struct, timeout_s: float | None = None) -> None:
        """Raises PeerUnreachable when the stream is broken, or full for longer than `timeout_s`."""
        body = encode(message)
        if len(body) > self._max_message_bytes:
            raise ProtocolError(f"refusing to send a message of {len(body)} bytes")
        try:
            with _unreachable():
                async with asyncio.timeout(timeout_s), self._sending:
                    await socket_io.send_all(self.sock, _LENGTH.pack(len(body)) + body)
        except TimeoutError as error:
            # Part of the message may have been sent, so the peer could not parse what follows. The socket is not closed
            # here: another task may be receiving on it.
            self.break_off()
            raise PeerUnreachable(f"could not send within {timeout_s:g} s") from error

    async def read(self, wanted: Decoder[T], timeout_s: float | None = None) -> T:
        """The next message, of one of the types wanted. Nothing is lost if the read is cancelled or times out.

        Raises PeerUnreachable at the end of the stream, PeerSilent after `timeout_s`, ProtocolError for any other
        message.
        """
        return decode(wanted, await self._whole_message(timeout_s), self._max_message_bytes)

    async def send_bytes(self, view: memoryview, timeout_s: float) -> None:
        """Send raw bytes, with no pause longer than `timeout_s`. Raises PeerUnreachable."""
        loop = asyncio.get_running_loop()
        try:
            with _unreachable():
                async with asyncio.timeout(timeout_s) as limit:
                    for start in range(0, len(view), _TIMED_BYTES):
                        piece = view[start : start + _TIMED_BYTES]
                        await socket_io.send_all(self.sock, piece)
                        self.sent_bytes += len(piece)
                        limit.reschedule(loop.time() + timeout_s)
        except TimeoutError as error:
            raise PeerUnreachable(f"took nothing within {timeout_s:g} s") from error

    async def receive_bytes(self, view: memoryview, timeout_s: float) -> int:
        """Receive raw bytes into `view`; returns how many. Raises PeerUnreachable, PeerSilent after `timeout_s`."""
        try:
            with _unreachable():
                async with asyncio.timeout(timeout_s):
                    received = await socket_io.receive_into(self.sock, view)
        except TimeoutError as error:
            raise PeerSilent(f"no byte within {timeout_s:g} s") from error
        if not received:
            raise PeerUnreachable("the peer closed the stream")
        return received

    async def fill(self, view: memoryview, timeout_s: float) -> None:
        """Fill `view` with raw bytes, with no pause longer than `timeout_s`. Raises as `receive_bytes`."""
        done = 0
        while done < len(view):
            done += await self.receive_bytes(view[done:], timeout_s)

    async def _whole_message(self, timeout_s: float | None) -> bytes:
        try:
            with _unreachable():
                async with asyncio.timeout(timeout_s):
                    await self._receive(_LENGTH.size)
                    (length,) = _LENGTH.unpack_from(self._received)
                    if length > self._max_message_bytes:
                        raise ProtocolError(
                            f"a message of {length} bytes; at most {self._max_message_bytes} are allowed"
                        )
                    await self._receive(_LENGTH.size + length)
        except TimeoutError as error:
            raise PeerSilent(f"no message within {timeout_s:g} s") from error
        body = bytes(self._received[_LENGTH.size : _LENGTH.size + length])
        del self._received[: _LENGTH.size + length]
        self.received_bytes += _LENGTH.size + length
        return body

    async def _receive(self, num_bytes: int) -> None:
        while len(self._received) < num_bytes:
            piece = await socket_io.receive(self.sock, num_bytes - len(self._received))
            if not piece:
                raise PeerUnreachable("the peer closed the stream")
            self._received += piece

    def break_off(self) -> None:
        """End the stream while another task may be sending or receiving on it; its owner still has to close it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    async def send_last(self, message: Struct, timeout_s: float) -> None:
        """`send`, then `let_the_other_close`."""
        await self.send(message, timeout_s)
        await self.let_the_other_close()

    async def let_the_other_close(self, timeout_s: float = OFTEN_S) -> None:
        """Wait until the other end closes, for at most this long; ignore what it sends. Then this end may close.

        If p2pd sees this end close first, it may reset the stream before the other end has read what was sent last.
        """
        with contextlib.suppress(PeerUnreachable, ProtocolError):
            await self._whole_message(timeout_s)

    def close(self) -> None:
        """May be repeated."""
        self.sock.close()


async def call(
    transport: StreamTransport,
    peer_id: str,
    protocol: str,
    *,
    timeout_s: float,
    maddrs: Sequence[str] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> Channel:
    """A channel on a new stream to a peer. Raises PeerUnreachable."""
    sock = await transport.open(peer_id, protocol, timeout_s=timeout_s, maddrs=maddrs)
    return Channel(sock, max_message_bytes=max_message_bytes)


@contextlib.contextmanager
def _unreachable() -> Iterator[None]:
    """Raises PeerUnreachable if the stream breaks."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerUnreachable(f"the stream broke: {error}") from error
