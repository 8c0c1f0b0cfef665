"""Frames of the reduction on one socket, with deadlines that a stop interrupts.

    1 byte kind | 4 bytes chunk | 4 bytes payload length | payload          (little-endian)

Sockets are used from one thread per direction, once `prepare` has seen them. Every wait is made of slices, after each
of which a stop is noticed. In a large group slices are longer: each has two threads for every other member.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import partial
from typing import NamedTuple

from peers.reduce.tcp_info import min_round_trip_s
from peers.timing import NEAR_S, SLICE_S

HEADER = struct.Struct("<BII")
_MOST_WAKES_PER_S = 200
"""Of all threads of one reduction together: with fifty peers on a machine, most of its time went into waking up."""
NOBODY = 0xFFFF_FFFF
_NEAR_WINDOW_BYTES = 1 << 20
"""The receive window with which a reduction begins, where the peer is no further away than that; the kernel raises it
if need be. Otherwise it would begin with the tens of MB to which earlier reductions have raised it. This way threads
are switched 40 % less often, and over plain TCP within one machine 10 to 15 % of the time is saved."""
_SLICE_IS_OVER = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Kind(IntEnum):
    CONTRIBUTION = 0
    """This chunk of the receiver's share, as the sender has it."""
    RESULT = 1
    """This chunk of the sender's share, averaged."""
    ALIVE = 2
    """The sender has no more to contribute, and waits; `chunk` is the index of the member that it waits for, or
    NOBODY."""
    ABORT = 3
    """The sender has given up; `chunk` is the index of the member it blames, or NOBODY. In place of a length: one more
    than the index of the member that said so first, 0 where the sender does. The last frame of a stream."""


class Header(NamedTuple):
    kind: int
    chunk: int
    """The chunk, or whom an abort blames or a sign of life names."""
    payload_bytes: int


def _ignore(_num_bytes: int) -> None:
    return


class Stopped(Exception):
    """The reduction was told to stop while waiting on a socket."""


class Stalled(Exception):
    """What a socket was to take or to give has not moved in time."""


class Closed(Exception):
    """The other end of the socket is gone, or takes nothing any more."""


def slice_s(num_others: int) -> float:
    """What one wait takes at most in a reduction with so many other members."""
    return max(SLICE_S, 2 * num_others / _MOST_WAKES_PER_S)


def prepare(sock: socket.socket, num_others: int = 1) -> None:
    """Have every call on this socket block for a slice at most, by the kernel's own timeout.

    Python's would poll before every call and leave the socket non-blocking, so that a chunk took many calls, each of
    which waits for the interpreter; this way it takes one. TLS keeps to Python's: there, it tries first and polls then,
    and a blocking socket whose time in the kernel is over it would just try again, for ever.
    """
    with contextlib.suppress(OSError, struct.error):
        if 0 < min_round_trip_s(sock) < NEAR_S:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_WINDOW_CLAMP, _NEAR_WINDOW_BYTES)
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(slice_s(num_others))
        return
    slice_ = struct.pack("ll", *divmod(int(slice_s(num_others) * 1e6), 10**6))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, slice_)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, slice_)


def send_frame(
    sock: socket.socket,
    header: Header,
    pieces: Iterable[memoryview],
    stall_timeout_s: float,
    stop: Callable[[], bool],
    moved: Callable[[int], None] = _ignore,
) -> None:
    """Send a whole frame. The deadline counts from the last byte that moved: the other end may have to wait between two
    of them. Raises Stopped, Stalled, Closed.

    The payload comes in one piece or more, each of which may be overwritten when the next is asked for. `moved` hears
    of bytes as they leave.
    """
    packed = HEADER.pack(*header)
    for piece in pieces:
        if packed and not isinstance(sock, ssl.SSLSocket):
            together = partial(_send_together, sock, packed, piece)
            _until_done(len(packed) + len(piece), together, stall_timeout_s, stop, moved)
        else:
            for part in (memoryview(packed), piece):
                _until_done(len(part), partial(_send_rest, sock, part), stall_timeout_s, stop, moved)
        packed = b""


def receive_into(
    sock: socket.socket,
    buffer: memoryview,
    timeout_s: float,
    stop: Callable[[], bool],
    moved: Callable[[int], None] = _ignore,
) -> None:
    """Fill the buffer, all of it in this time. Raises Stopped, Stalled, Closed."""
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    _until_done(
        len(buffer),
        lambda done: sock.recv_into(buffer[done:], 0, flags),
        timeout_s,
        stop,
        moved,
        counts_from_last_byte=False,
    )


def receive_header(sock: socket.socket, timeout_s: float, stop: Callable[[], bool]) -> Header:
    buffer = bytearray(HEADER.size)
    receive_into(sock, memoryview(buffer), timeout_s, stop)
    return Header(*HEADER.unpack(buffer))


def is_silent(sock: socket.socket) -> bool:
    """Whether a stream is open on which the other end never sends: anything to read there would be its end."""
    if sock.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)


def _send_together(sock: socket.socket, packed: bytes, piece: memoryview, done: int) -> int:
    if done >= len(packed):
        return sock.send(piece[done - len(packed) :])
    return sock.sendmsg((packed[done:], piece))


def _send_rest(sock: socket.socket, part: memoryview, done: int) -> int:
    return sock.send(part[done:])


def _until_done(
    size: int,
    move: Callable[[int], int],
    timeout_s: float,
    stop: Callable[[], bool],
    moved: Callable[[int], None],
    *,
    counts_from_last_byte: bool = True,
) -> None:
    done, until = 0, time.monotonic() + timeout_s
    while done < size:
        if stop():
            raise Stopped
        if time.monotonic() > until:
            raise Stalled
        try:
            count = move(done)
        except _SLICE_IS_OVER:
            continue
        except OSError as error:
            raise Closed(str(error)) from error
        if count == 0:
            raise Closed("it closed the stream")
        done += count
        moved(count)
        if counts_from_last_byte:
            until = time.monotonic() + timeout_s
