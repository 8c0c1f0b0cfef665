"""The bandwidth of this peer's link, measured in the reductions that it takes part in.

The shares of the next rounds depend on it, so it must be the link's own limit and not the pace of the slowest member,
for which everybody waits. Therefore it is the highest rate in any short window: at the start of a round every peer has
bytes for every other, and all links are busy.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable

from peers.reduce.tcp_info import bytes_acked, bytes_received
from peers.timing import WINDOW_S

SAMPLE_S = WINDOW_S / 4
"""Not more often: asking the kernel about a socket waits until a copy on it has ended, holding the interpreter."""

_REMEMBERED = 5


class PeakRate:
    """The highest rate over any window, from samples of a count that never falls."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    def add(self, now: float, total_bytes: float) -> None:
        """Times ascend."""
        self._samples.append((now, total_bytes))

    def bytes_per_s(self) -> float:
        """0 if all of it is shorter than a window: that would measure the work there was, not the link."""
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
    """The bandwidth of this peer's link: the second highest of the last five reductions.

    A reduction in which others are slower, or which has little for this peer to do, leaves the link idle; taking its
    rate for the limit would give the peer still less to do. The first reduction does not count: it touches all its
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
        """A reduction's; 0 if it was too short to tell."""
        if bytes_per_s <= 0:
            return
        if self._has_begun:
            self._seen.append(bytes_per_s)
        self._has_begun = True


class LinkMeter:
    """Follows one reduction; what its link carried is then the lesser of the two directions' peaks."""

    def __init__(self, send: Iterable[socket.socket], receive: Iterable[socket.socket]) -> None:
        self._send, self._receive = tuple(send), tuple(receive)
        self._sent, self._received = PeakRate(), PeakRate()

    def sample(self, now: float, sent_bytes: int, received_bytes: int, forwarded_bytes: int = 0) -> None:
        """The byte counts are our own, for sockets whose kernel has none; several times per window, and at both ends.

        They run ahead of the link by what fits into the buffers on the way, so the kernel's are preferred.
        `forwarded_bytes` is what the link has carried for others, each way. Without them a relay would seem to have a
        slow link and be given a smaller share, although the more it owns, the less its two peers send each other
        through it.
        """
        self._sent.add(now, forwarded_bytes + _on_the_wire(self._send, bytes_acked, sent_bytes))
        received = _on_the_wire(self._receive, bytes_received, received_bytes)
        self._received.add(now, forwarded_bytes + received)

    def bytes_per_s(self) -> float:
        """0: too short to tell."""
        return min(self._sent.bytes_per_s(), self._received.bytes_per_s())


def _on_the_wire(
    sockets: Iterable[socket.socket], count: Callable[[socket.socket], int], otherwise: int
) -> int:
    """Sum over TCP sockets; `otherwise` if any of them is of another kind, or gone."""
    with contextlib.suppress(OSError, struct.error):
        return sum(map(count, sockets))
    return otherwise
