"""Which path the bytes to one peer take, decided from what the paths before have shown. Pure: time is an argument.

The first round goes over libp2p, which needs nothing but a connection that exists. Meanwhile a direct stream is tried,
off the round's way; it carries the next rounds unless it proves slower. So the comparison costs no probe: the
same pair moves the same bytes on both paths, in the company of the same others: every one of them may hold a round up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from peers.protocol.records import Path

FIRST_BACK_OFF_S = 30.0
LONGEST_BACK_OFF_S = 600.0
MEASURED_BYTES = 16 << 20
"""A round that moves fewer bytes says more about latencies than about a path."""
MUCH_SLOWER = 0.7
"""A path at less than this share of the other's rate is not used; noise is well above."""
_MOST_FAILURES = 16
_ENOUGH = 3
_KEPT = 5


_Rates = dict[bool, deque[tuple[float, float]]]
"""Of direct paths and of others: when, and bytes/s."""


def _no_rates() -> _Rates:
    return {True: deque(maxlen=_KEPT), False: deque(maxlen=_KEPT)}


@dataclass
class BackOff:
    """A path that failed is left alone for a while, each time for longer."""

    num_failures: int = 0
    until: float = -float("inf")

    def failed(self, now: float) -> None:
        if now < self.until:
            # The same failure, noticed by another stream.
            return
        wait_s = min(FIRST_BACK_OFF_S * 2**self.num_failures, LONGEST_BACK_OFF_S)
        self.num_failures, self.until = min(self.num_failures + 1, _MOST_FAILURES), now + wait_s

    def stood(self) -> None:
        self.num_failures, self.until = 0, -float("inf")


@dataclass
class Pair:
    """What is known of the paths to one peer."""

    direct: BackOff = field(default_factory=BackOff)
    libp2p: BackOff = field(default_factory=BackOff)
    direct_has_stood: bool = False
    doubt: BackOff = field(default_factory=BackOff)
    """Something was lost to this peer: what seems to stand between us may carry nothing."""
    in_use: Path | None = None
    """What the newest stream for data goes over; before there is one, any stream."""
    in_use_for_data: bool = False
    _rates: _Rates = field(default_factory=_no_rates)
    _group: frozenset[str] = frozenset()

    def measured(
        self, path: Path, num_bytes: float, seconds: float, now: float, group: frozenset[str] = frozenset()
    ) -> None:
        """One round's bytes to this peer, and how long the round of this group took to move them."""
        if num_bytes >= MEASURED_BYTES and seconds > 0:
            if group != self._group:
                # What a newcomer costs is no fault of the path.
                self._group, self._rates = group, _no_rates()
            self._rates[path in (Path.DIRECT, Path.PLAIN)].append((now, num_bytes / seconds))

    def direct_stood(self) -> None:
        self.direct.stood()
        self.doubt.stood()
        self.direct_has_stood = True

    def direct_failed(self, now: float) -> None:
        self.direct.failed(now)
        self.direct_has_stood = False

    def missed(self, now: float) -> None:
        """It did not answer on what stands, or not in time."""
        self.doubt.failed(now)

    def is_doubted(self, now: float) -> bool:
        return now < self.doubt.until

    def may_go_direct(self, now: float) -> bool:
        """Whether a direct stream is worth having."""
        return now >= self.direct.until and not self._direct_is_slower(now)

    def is_ready_for_direct(self, now: float) -> bool:
        """Whether a direct stream may be opened while a round waits for it: it has stood before."""
        return self.direct_has_stood and self.may_go_direct(now)

    @property
    def rate(self) -> float:
        """The best of the last rounds of this group on whichever path, in bytes/s; 0: not known."""
        return max((rate for rates in self._rates.values() for _, rate in rates), default=0.0)

    def _direct_is_slower(self, now: float) -> bool:
        direct, libp2p = self._rates[True], self._rates[False]
        if len(direct) < _ENOUGH or not libp2p or now - direct[-1][0] > LONGEST_BACK_OFF_S:
            return False
        # Rounds are held up by others too, so the best ones tell what a path can do.
        return max(rate for _, rate in direct) < MUCH_SLOWER * max(rate for _, rate in libp2p)
