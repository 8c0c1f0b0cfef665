"""The wire format of a reduction: frames on one socket, sent and received under deadlines that can be interrupted.

    1 byte kind | 4 bytes chunk | 4 bytes payload length | payload          (little-endian)

Payloads are values as a codec encodes them (codecs.py). After `prepare`, a socket is used by one thread per direction.
Every wait consists of slices, and a stop is noticed after each of them. Slices are longer in a large group, where each
member has two threads for every neighbour.
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

from peers.reduce.bandwidth import min_round_trip_s
from peers.timing import NEAR_S, SLICE_S

HEADER = struct.Struct("<BII")
_MOST_WAKES_PER_S = 200
"""Over all threads of one reduction: with fifty peers on one machine, wake-ups took most of its time."""
NOBODY = 0xFFFF_FFFF
_NEAR_WINDOW_BYTES = 1 << 20
"""The receive window at the start of a reduction with a peer that is near (NEAR_S); the kernel raises it if need be.
Without this the window starts at the tens of MB to which earlier reductions raised it. It saves 40 % of thread switches
and, over plain TCP within one machine, 10 to 15 % of the time."""
_SLICE_IS_OVER = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Kind(IntEnum):
    CONTRIBUTION = 0
    """The sender's values of a chunk that the receiver collects; within a column, the sum of those it has collected."""
    RESULT = 1
    """The average of a chunk of the sender's share, or, passed on, of its column's."""
    ALIVE = 2
    """The sender has sent all contributions that it can, and waits. `chunk` is the index of the member that it waits
    for, or NOBODY."""
    ABORT = 3
    """The sender has aborted; the last frame of a stream. `chunk` is the index of the member that it blames, or NOBODY.
    In place of the payload length: 1 + the index of the first accuser, or 0 if that is the sender."""


class Header(NamedTuple):
    kind: int
    chunk: int
    """The chunk's place among those of its kind on this stream (plan.py); for ABORT and ALIVE the index of a member."""
    payload_bytes: int


class Stopped(Exception):
    """The reduction was told to stop while waiting on a socket."""


class Stalled(Exception):
    """A socket has not sent or received its bytes in time."""


class Closed(Exception):
    """The other end of the socket is gone, or does not read any more."""


def slice_s(num_others: int) -> float:
    """The longest single wait in a reduction with this many neighbours."""
    return max(SLICE_S, 2 * num_others / _MOST_WAKES_PER_S)


def prepare(sock: socket.socket, num_others: int = 1) -> None:
    """Make every call on this socket block for one slice at most, by the kernel's timeout (SO_RCVTIMEO, SO_SNDTIMEO).

    Python's own timeout makes the socket non-blocking and polls before every call, so that a chunk takes many calls,
    each of which waits for the interpreter lock; with the kernel's it takes one. TLS sockets use Python's timeout: the
    ssl module retries a blocking socket for ever when the kernel's timeout is over.
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
    moved: Callable[[int], object] = lambda _num_bytes: None,
) -> None:
    """Send a whole frame. The timeout restarts with every byte sent, because the receiver may have to wait within a
    frame. Raises Stopped, Stalled, Closed.

    The payload comes in one or more pieces, each of which may be overwritten when the next is asked for. `moved` is
    called with the number of bytes as they are sent.
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
    moved: Callable[[int], object] = lambda _num_bytes: None,
) -> None:
    """Fill the whole buffer within `timeout_s`. Raises Stopped, Stalled, Closed."""
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
    """Whether this stream is open and nothing on it is left to read, not even its end."""
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
    moved: Callable[[int], object],
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
