"""The bandwidth of this peer's link, measured by the kernel's counters in the reductions in which the peer takes part.

The shares of the next rounds depend on it, so it must be the limit of this link, not the pace of the slowest member,
which all others wait for. It is therefore the highest rate in any short window: at the start of a round every peer has
bytes to send to every other, and all links are busy.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable

from peers.system import tcp_info
from peers.timing import WINDOW_S

# Offsets in the struct tcp_info of Linux 4.6 and newer (linux/tcp.h).
_BYTES_ACKED = struct.Struct("120xQ")
_BYTES_RECEIVED = struct.Struct("128xQ")
_MIN_RTT_US = struct.Struct("148xI")


def bytes_acked(sock: socket.socket) -> int:
    """Bytes acknowledged by the other end. As the next two, raises OSError, or struct.error on an older kernel."""
    return _field(sock, _BYTES_ACKED)


def bytes_received(sock: socket.socket) -> int:
    return _field(sock, _BYTES_RECEIVED)


def min_round_trip_s(sock: socket.socket) -> float:
    """The shortest round trip of the last minutes, without queueing; above an hour: none has been measured."""
    return 1e-6 * _field(sock, _MIN_RTT_US)


def _field(sock: socket.socket, field: struct.Struct) -> int:
    value: int = field.unpack(tcp_info(sock, field.size))[0]
    return value


SAMPLE_S = WINDOW_S / 4
"""Not shorter: a getsockopt waits for a running copy on that socket, and holds the interpreter lock meanwhile."""

_REMEMBERED = 5


class PeakRate:
    """The highest rate over any window, from samples of a counter that never decreases."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    def add(self, now: float, total_bytes: float) -> None:
        """Times ascend."""
        self._samples.append((now, total_bytes))

    def bytes_per_s(self) -> float:
        """0 if the samples span less than a window: that would measure the amount of work, not the link."""
        best, first, samples = 0.0, 0, self._samples
        for now, total in samples:
            if now - samples[0][0] < WINDOW_S:
                continue
            # The shortest span that ends here and is not shorter than a window.
            while now - samples[first + 1][0] >= WINDOW_S:
                first += 1
            begun, before = samples[first]
            best = max(best, (total - before) / (now - begun))
        return best


class Bandwidth:
    """The bandwidth of this peer's link: the second highest rate of the last five reductions.

    A reduction in which others are slower, or which has little for this peer to do, leaves the link idle; a low rate
    measured in it would give this peer a still smaller share. The first reduction does not count: it touches all its
    memory for the first time, which may be slower than the link.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_REMEMBERED)
        self._has_begun = False

    @property
    def bytes_per_s(self) -> float:
        """0: not known yet."""
        descending = sorted(self._seen, reverse=True)
        return descending[min(1, len(descending) // 3)] if descending else 0.0

    def saw(self, bytes_per_s: float) -> None:
        """Record the rate of one reduction; 0: it was too short to tell."""
        if bytes_per_s <= 0:
            return
        if self._has_begun:
            self._seen.append(bytes_per_s)
        self._has_begun = True


class LinkMeter:
    """Measures the link during one reduction: the lower of the two directions' peak rates."""

    def __init__(self, send: Iterable[socket.socket], receive: Iterable[socket.socket]) -> None:
        self._send, self._receive = tuple(send), tuple(receive)
        self._sent, self._received = PeakRate(), PeakRate()

    def sample(self, now: float, sent_bytes: int, received_bytes: int, forwarded_bytes: int = 0) -> None:
        """To be called several times per window, and at start and end.

        `sent_bytes` and `received_bytes` are this process's counts, used only where the kernel has no counters: they
        run ahead of the link by what fits into the buffers on the way. `forwarded_bytes` is what the link has carried
        for others, each way: without it a relay would seem to have a slow link and get a smaller share, although the
        more it owns, the less its two peers send each other through it.
        """
        self._sent.add(now, forwarded_bytes + _on_the_wire(self._send, bytes_acked, sent_bytes))
        received = _on_the_wire(self._receive, bytes_received, received_bytes)
        self._received.add(now, forwarded_bytes + received)

    def bytes_per_s(self) -> float:
        """0: the reduction was too short to tell."""
        return min(self._sent.bytes_per_s(), self._received.bytes_per_s())


def _on_the_wire(
    sockets: Iterable[socket.socket], count: Callable[[socket.socket], int], otherwise: int
) -> int:
    """The sum of the kernel's counts over all sockets; `otherwise` if one of them is not TCP, or closed."""
    with contextlib.suppress(OSError, struct.error):
        return sum(map(count, sockets))
    return otherwise
