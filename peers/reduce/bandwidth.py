"""What this peer's link carries, as seen by the reductions it takes part in.

The shares of the next rounds go by it, so it has to be the link's own limit and not the pace of the slowest member, for
whom everybody waits. Therefore it is the most that went through in any short while: at the start of a round all peers
have bytes for all, and every link is busy.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable

from peers.reduce.tcp_info import bytes_acked, bytes_received

WINDOW_S = 0.5
"""Long enough to outlast the bursts of queues and shapers, short enough to lie within a round that is worth sharing."""
SAMPLE_S = WINDOW_S / 4
"""Not more often: to ask the kernel about a socket waits for whoever is copying on it, and the interpreter with it."""

_REMEMBERED = 5


class PeakRate:
    """The highest rate over any window, from samples of a count that never falls."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    def add(self, now: float, total_bytes: float) -> None:
        """Times ascend."""
        self._samples.append((now, total_bytes))

    def bytes_per_s(self) -> float:
        """0 if all of it is shorter than a window: what went through then is what there was to do, not what could."""
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
    """What this peer's link carries, by the reductions of late.

    The most that two of the last five saw. One in which others are slower, or which has little for this peer to do,
    leaves the link idle: to take that for its limit would give the peer still less to do. The first does not count,
    since it touches all its memory for the first time and may be slower than the link for that.
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
        `forwarded_bytes` is what the link has carried for others, each way. Without them, who forwards for two others
        would seem to have a slow link, and would own less: but all that they send each other's shares goes over that
        link twice, and the more of the vector its peer owns, the less that is.
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
