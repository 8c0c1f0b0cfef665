"""Small messages between peers: structs of peers/protocol behind a 4-byte length, on a stream of the transport."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TypeVar

from msgspec.msgpack import Decoder

from peers.errors import PeerSilent, PeerUnreachable, ProtocolError
from peers.net import socket_io
from peers.protocol.wire import Struct, decode, encode

MAX_MESSAGE_BYTES = 1 << 20
T = TypeVar("T")

_LENGTH = struct.Struct("<I")


class Channel:
    """Messages over a non-blocking socket, of TLS or not, which it owns. One task may send while another receives."""

    def __init__(self, sock: socket.socket, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._max_message_bytes = max_message_bytes
        self._sending = asyncio.Lock()
        self._received = bytearray()
        self.received_bytes = 0
        """In whole messages."""

    async def send(self, message: Struct, timeout_s: float | None = None) -> None:
        """Raises PeerUnreachable when the stream is broken, or full for longer than `timeout_s`."""
        body = encode(message)
        if len(body) > self._max_message_bytes:
            raise ProtocolError(f"refusing to send a message of {len(body)} bytes")
        try:
            async with asyncio.timeout(timeout_s), self._sending:
                await socket_io.send_all(self._sock, _LENGTH.pack(len(body)) + body)
        except TimeoutError as error:
            # Part of the frame may be out: nothing after it would make sense. Whoever receives still has the socket.
            self.break_off()
            raise PeerUnreachable(f"could not send within {timeout_s:g} s") from error
        except OSError as error:
            raise PeerUnreachable(f"the stream broke: {error}") from error

    async def read(self, wanted: Decoder[T], timeout_s: float | None = None) -> T:
        """The next message, one of those wanted; a read that was cancelled or timed out loses nothing.

        Raises PeerUnreachable at the end of the stream, PeerSilent after `timeout_s`, ProtocolError for any other
        message.
        """
        return decode(wanted, await self._whole_message(timeout_s), self._max_message_bytes)

    async def _whole_message(self, timeout_s: float | None) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                await self._fill(_LENGTH.size)
                (length,) = _LENGTH.unpack_from(self._received)
                if length > self._max_message_bytes:
                    raise ProtocolError(
                        f"a message of {length} bytes; at most {self._max_message_bytes} are allowed"
                    )
                await self._fill(_LENGTH.size + length)
        except TimeoutError as error:
            raise PeerSilent(f"no message within {timeout_s:g} s") from error
        except OSError as error:
            raise PeerUnreachable(f"the stream broke: {error}") from error
        body = bytes(self._received[_LENGTH.size : _LENGTH.size + length])
        del self._received[: _LENGTH.size + length]
        self.received_bytes += _LENGTH.size + length
        return body

    def break_off(self) -> None:
        """End the stream under whoever sends or receives on it right now; its owner still has to close it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    async def let_the_other_close(self, timeout_s: float) -> None:
        """Wait for that, for so long; what comes instead is not heard.

        Where p2pd sees this end close first, it may reset the stream before the other has read what was sent last.
        """
        with contextlib.suppress(PeerUnreachable, ProtocolError):
            await self._whole_message(timeout_s)

    def close(self) -> None:
        """May be repeated."""
        self._sock.close()

    async def _fill(self, num_bytes: int) -> None:
        while len(self._received) < num_bytes:
            piece = await socket_io.receive(self._sock, num_bytes - len(self._received))
            if not piece:
                raise PeerUnreachable("the peer closed the stream")
            self._received += piece
