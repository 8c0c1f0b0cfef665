"""Frames of the reduction on one socket, with deadlines that a stop interrupts.

    1 byte kind | 4 bytes chunk | 4 bytes payload length | payload          (little-endian)

Sockets are used from one thread per direction. Every wait is made of slices, after each of which a stop is noticed.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

HEADER = struct.Struct("<BII")
SLICE_S = 0.05
NOBODY = 0xFFFF_FFFF


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


class Stopped(Exception):
    """The reduction was told to stop while waiting on a socket."""


class Stalled(Exception):
    """Nothing moved on a socket for as long as the deadline allows."""


class Closed(Exception):
    """The other end of the socket is gone, or takes nothing any more."""


def send_all(
    sock: socket.socket, payload: memoryview | bytes, stall_timeout_s: float, stop: Callable[[], bool]
) -> None:
    """Send every byte. The deadline counts from the last byte that moved. Raises Stopped, Stalled, Closed."""
    view = memoryview(payload)
    _until_done(len(view), lambda done: sock.send(view[done:]), sock, stall_timeout_s, stop)


def receive_into(
    sock: socket.socket, buffer: memoryview, stall_timeout_s: float, stop: Callable[[], bool]
) -> None:
    """Fill the buffer. The deadline counts from the last byte that moved. Raises Stopped, Stalled, Closed."""
    _until_done(len(buffer), lambda done: sock.recv_into(buffer[done:]), sock, stall_timeout_s, stop)


def receive_header(sock: socket.socket, stall_timeout_s: float, stop: Callable[[], bool]) -> Header:
    buffer = bytearray(HEADER.size)
    receive_into(sock, memoryview(buffer), stall_timeout_s, stop)
    return Header(*HEADER.unpack(buffer))


def _until_done(
    size: int,
    move: Callable[[int], int],
    sock: socket.socket,
    stall_timeout_s: float,
    stop: Callable[[], bool],
) -> None:
    sock.settimeout(SLICE_S)
    done, last_moved_at = 0, time.monotonic()
    while done < size:
        if stop():
            raise Stopped
        try:
            moved = move(done)
        except TimeoutError:
            if time.monotonic() - last_moved_at > stall_timeout_s:
                raise Stalled from None
            continue
        except OSError as error:
            raise Closed(str(error)) from error
        if moved == 0:
            raise Closed("it closed the stream")
        done += moved
        last_moved_at = time.monotonic()
