"""Frames of the reduction on one socket, with deadlines that a stop interrupts.

    1 byte kind | 4 bytes chunk | 4 bytes payload length | payload          (little-endian)

Sockets are used from one thread per direction, once `prepare` has seen them. Every wait is made of slices, after each
of which a stop is noticed.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("<BII")
SLICE_S = 0.05
NOBODY = 0xFFFF_FFFF
_SLICE_IS_OVER = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Kind(IntEnum):
    CONTRIBUTION = 0
    """This chunk of the receiver's share, as the sender has it."""
    RESULT = 1
    """This chunk of the sender's share, averaged."""
    ALIVE = 2
    """The sender waits for a third member."""
    ABORT = 3
    """The sender has given up; `chunk` is the index of the member it blames, or NOBODY. The last frame of a stream."""


class Header(NamedTuple):
    kind: int
    chunk: int
    """The chunk, or whom an abort blames."""
    payload_bytes: int


def _ignore(_num_bytes: int) -> None:
    return


class Stopped(Exception):
    """The reduction was told to stop while waiting on a socket."""


class Stalled(Exception):
    """Nothing moved on a socket for as long as the deadline allows."""


class Closed(Exception):
    """The other end of the socket is gone, or takes nothing any more."""


def prepare(sock: socket.socket) -> None:
    """Have every call on this socket block for a slice at most, by the kernel's own timeout.

    Python's would poll before every call and leave the socket non-blocking, so that a chunk took many calls, each of
    which waits for the interpreter; this way it takes one. TLS keeps to Python's: there, it tries first and polls then,
    and a blocking socket whose time in the kernel is over it would just try again, for ever.
    """
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(SLICE_S)
        return
    slice_ = struct.pack("ll", 0, int(SLICE_S * 1e6))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, slice_)


def send_frame(
    sock: socket.socket,
    header: Header,
    payload: memoryview,
    stall_timeout_s: float,
    stop: Callable[[], bool],
    moved: Callable[[int], None] = _ignore,
) -> None:
    """Send a whole frame. The deadline counts from the last byte that moved. Raises Stopped, Stalled, Closed.

    `moved` hears of bytes as they leave.
    """
    packed = HEADER.pack(*header)
    if isinstance(sock, ssl.SSLSocket):
        _until_done(len(packed), lambda done: sock.send(packed[done:]), stall_timeout_s, stop, moved)
        _until_done(len(payload), lambda done: sock.send(payload[done:]), stall_timeout_s, stop, moved)
        return

    def send(done: int) -> int:
        if done >= len(packed):
            return sock.send(payload[done - len(packed) :])
        return sock.sendmsg((packed[done:], payload))

    _until_done(len(packed) + len(payload), send, stall_timeout_s, stop, moved)


def receive_into(
    sock: socket.socket,
    buffer: memoryview,
    stall_timeout_s: float,
    stop: Callable[[], bool],
    moved: Callable[[int], None] = _ignore,
) -> None:
    """Fill the buffer. The deadline counts from the last byte that moved. Raises Stopped, Stalled, Closed."""
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    _until_done(
        len(buffer), lambda done: sock.recv_into(buffer[done:], 0, flags), stall_timeout_s, stop, moved
    )


def receive_header(sock: socket.socket, stall_timeout_s: float, stop: Callable[[], bool]) -> Header:
    buffer = bytearray(HEADER.size)
    receive_into(sock, memoryview(buffer), stall_timeout_s, stop)
    return Header(*HEADER.unpack(buffer))


def _until_done(
    size: int,
    move: Callable[[int], int],
    stall_timeout_s: float,
    stop: Callable[[], bool],
    moved: Callable[[int], None],
) -> None:
    done, last_moved_at = 0, time.monotonic()
    while done < size:
        if stop():
            raise Stopped
        try:
            count = move(done)
        except _SLICE_IS_OVER:
            if time.monotonic() - last_moved_at > stall_timeout_s:
                raise Stalled from None
            continue
        except OSError as error:
            raise Closed(str(error)) from error
        if count == 0:
            raise Closed("it closed the stream")
        done += count
        moved(count)
        last_moved_at = time.monotonic()
