"""What a peer remembers of its own training for observers: totals, a curve, the last rounds, what went wrong.

Bounded however long it trains, and pure: times are arguments, in Unix seconds. The complete history is in
metrics.jsonl.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from peers.protocol.reports import (
    MAX_FAILURES,
    MAX_INCIDENTS,
    MAX_POINTS,
    MAX_ROUNDS,
    MAX_SHOWN_RANKS,
    MAX_TEXT,
    MAX_TROUBLES,
    PARTS,
    Evaluation,
    Incident,
    Parts,
    Point,
    RoundEntry,
)
from peers.state.handover import EpochOutcome
from peers.timing import OFTEN_S


class Curve:
    """A series of points, thinned as it grows: at most MAX_POINTS, evenly over the whole time."""

    def __init__(self, least_interval_s: float = OFTEN_S) -> None:
        self.points: list[Point] = []
        self._interval_s = least_interval_s

    def add(self, point: Point) -> None:
        """A point that comes too soon after the last one is dropped."""
        if self.points and point.time - self.points[-1].time < self._interval_s:
            return
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            self.points = self.points[::2]
            self._interval_s *= 2

    def since(self, moment: float) -> list[Point]:
        """The points after this moment."""
        return [point for point in self.points if point.time > moment]


@dataclass
class Journal:
    loss: float | None = None
    curve: Curve = field(default_factory=Curve)
    rounds: deque[RoundEntry] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS))
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=MAX_INCIDENTS))
    evaluations: deque[Evaluation] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    troubles: dict[str, str] = field(default_factory=dict)
    """Current problems, by what they concern."""
    num_rounds: int = 0
    num_failures: int = 0
    num_worker_losses: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def progressed(self, point: Point) -> None:
        """The worker has told how it goes."""
        self.loss = point.loss
        self.curve.add(point)

    def committed(self, entry: RoundEntry) -> None:
        """An epoch is over."""
        self.rounds.append(entry)
        self.num_rounds += 1
        self.num_failures += entry.num_failures
        self.sent_bytes += entry.sent_bytes
        self.received_bytes += entry.received_bytes

    def happened(self, now: float, text: str) -> None:
        """One line for people. It is shown as this peer's own, so text of another peer is only quoted in it."""
        self.incidents.append(Incident(time=now, text=printable(text)))

    def is_in_trouble(self, what: str, text: str) -> None:
        """Set a problem; an empty text clears it."""
        self.troubles.pop(what, None)
        if text and len(self.troubles) < MAX_TROUBLES:
            self.troubles[what] = printable(text)

    @property
    def upload_bytes_per_s(self) -> float:
        """Send rate of the last reduction; 0 before the first."""
        return _rate(self.rounds, lambda entry: entry.sent_bytes)

    @property
    def download_bytes_per_s(self) -> float:
        """Receive rate of the last reduction; 0 before the first."""
        return _rate(self.rounds, lambda entry: entry.received_bytes)


def entry_of(outcome: EpochOutcome, now: float) -> RoundEntry:
    """What the journal keeps of an epoch that ends now."""
    return RoundEntry(
        time=now,
        epoch=outcome.epoch,
        fragment=outcome.fragment,
        anchor_digest=outcome.anchor_digest,
        contributors=tuple(sorted(outcome.contributors))[:MAX_SHOWN_RANKS],
        sent_bytes=outcome.sent_bytes,
        received_bytes=outcome.received_bytes,
        num_failures=outcome.num_failures,
        failures=shown_failures(outcome.failures),
        parts=Parts(**{part: getattr(outcome, part) for part in PARTS}),
        round_s=outcome.round_s,
    )


def shown_failures(reasons: Iterable[str]) -> tuple[str, ...]:
    """The last of them, shortened, without unsafe characters."""
    return tuple(printable(reason) for reason in list(reasons)[-MAX_FAILURES:])


def printable(text: str, max_length: int = MAX_TEXT) -> str:
    """Short, and without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:max_length])


def _rate(rounds: Iterable[RoundEntry], num_bytes: Callable[[RoundEntry], int]) -> float:
    for entry in reversed(tuple(rounds)):
        if num_bytes(entry) and (seconds := entry.parts.reduce_s) > 0:
            return num_bytes(entry) / seconds
    return 0.0
