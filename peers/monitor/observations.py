"""What an observer makes of all it hears of a swarm: who is there, who is lost, and how everybody stands. Pure.

An observer hears of a peer in three ways. Announcements in the DHT outlive their peer by up to twenty seconds. A peer
that answers sends a report every second, and when its stream breaks it is most likely dead. Each report lists the peers
that are here for its sender: so a peer that only the observer cannot reach does not count as lost, and one that is here
for nobody any more is lost a moment after its death. Times are by any one clock, unless called Unix time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from peers.monitor.journal import Curve
from peers.protocol.certificates import Certificate
from peers.protocol.records import Announcement
from peers.protocol.reports import (
    MAX_INCIDENTS,
    MAX_POINTS,
    MAX_ROUNDS,
    Evaluation,
    Incident,
    Point,
    Report,
    RoundEntry,
)
from peers.timing import FORGET_S, LOOK_S, OFTEN_S, RECORD_TTL_S, STALL_S

QUIET_AFTER_S = 4 * OFTEN_S
"""A peer that has told nothing for so long, though several reports were due, does not count as one that answers."""
COMING_BACK_S = STALL_S
"""For so long, a restarted peer that nobody hears of yet does not count as lost."""
NEVER_MET_S = RECORD_TTL_S + LOOK_S
"""A peer that nobody hears of is shown for so long: the DHT may still have its announcement."""
MAX_OBSERVATIONS = 1024
MAX_EVENTS = 100

T = TypeVar("T", RoundEntry, Incident, Evaluation, Point)
LOST, SILENT = "lost", "silent"
"""States of a peer besides those that it announces. Lost: no peer that is there hears of it any more.
Silent: it does not answer, and there is nobody else to ask."""


@dataclass
class Observation:
    """What is known of one peer."""

    announcement: Announcement
    """The newest, by the peer's own clock."""
    report: Report | None = None
    sees: frozenset[str] = frozenset()
    """The peers that are here for it, as it has last reported."""
    heard_at: float | None = None
    """When the last report came."""
    is_failing: bool = False
    """The last attempt to ask it failed, or the stream broke."""
    withheld: str = ""
    """Why it gave no report when last asked, although it is there, and what the user can do."""
    was_told_of: bool = False
    """The peer itself or another one has reported that it is there."""
    shown_state: str = ""
    """Its state at the last `note`."""
    lost_at: float | None = None
    clock_ahead_s: float = 0.0
    """How far its clock is ahead of this machine's."""
    reborn_at: float | None = None
    """When it was first heard of after it was started again."""
    curve: Curve = field(default_factory=Curve)
    rounds: deque[RoundEntry] = field(default_factory=lambda: deque(maxlen=MAX_ROUNDS))
    incidents: deque[Incident] = field(default_factory=lambda: deque(maxlen=MAX_INCIDENTS))
    evaluations: deque[Evaluation] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    certificate: Certificate | None = None
    """The newest that the peer has shown."""

    @property
    def certified_state(self) -> Certificate | None:
        """The certificate of the state that the peer announces, if it has shown that one."""
        said, shown = self.announcement, self.certificate
        is_its_own = shown is not None and (shown.head, shown.body.anchor) == (said.head, said.anchor_digest)
        return shown if is_its_own else None

    def answers(self, now: float) -> bool:
        return not self.is_failing and self.heard_at is not None and now - self.heard_at <= QUIET_AFTER_S

    def is_coming_back(self, now: float) -> bool:
        is_reborn = self.reborn_at is not None and now - self.reborn_at < COMING_BACK_S
        return is_reborn and self.heard_at is None


@dataclass(frozen=True)
class Event:
    """A change of a peer's state that the observer saw. `time` is Unix time."""

    time: float
    world_rank: int
    what: str


class Observations:
    """All that one observer has heard, by peer id. Used from one event loop."""

    def __init__(self) -> None:
        self.peers: dict[str, Observation] = {}
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.withheld = ""
        """Why no announcement counts although there are some, and what the user can do."""

    def announced(self, announcement: Announcement, now: float) -> None:
        """A checked announcement, from the DHT or in a report. Ignored if it is not newer than the one held."""
        known = self.peers.get(announcement.peer_id)
        if known is None:
            if len(self.peers) < MAX_OBSERVATIONS:
                self.peers[announcement.peer_id] = Observation(announcement)
        elif announcement.time > known.announcement.time:
            if announcement.incarnation != known.announcement.incarnation:
                known.reborn_at, known.heard_at, known.is_failing, known.withheld = now, None, False, ""
            known.announcement = announcement

    def reported(
        self, announcement: Announcement, report: Report, now: float, *, unix_now: float | None = None
    ) -> None:
        """A peer has answered."""
        self.announced(announcement, now)
        known = self.peers.get(announcement.peer_id)
        if known is None:
            return
        known.report, known.heard_at, known.is_failing, known.was_told_of = report, now, False, True
        known.withheld = ""
        if report.sees is not None:
            known.sees = frozenset(report.sees)
        if unix_now is not None:
            known.clock_ahead_s = announcement.time - unix_now
        if report.certified is not None:
            known.certificate = report.certified.certificate
        # Discard what lies in the future by its own clock: it could not be shown as a time.
        latest = announcement.time
        known.rounds.extend(_new(report.rounds, known.rounds, latest))
        known.incidents.extend(_new(report.incidents, known.incidents, latest))
        known.evaluations.extend(_new(report.evaluations, known.evaluations, latest))
        for point in _new(report.points, known.curve.points, latest):
            known.curve.add(point)

    def missed(self, peer_id: str, withheld: str = "") -> None:
        """A peer could not be asked, or has closed the stream, or is there but gives no report: then why."""
        if (known := self.peers.get(peer_id)) is not None:
            known.is_failing, known.withheld = True, withheld

    def witnesses(self, now: float, *, besides: str = "") -> list[Observation]:
        """Peers whose reports count as evidence of who is there."""
        return [
            peer
            for peer_id, peer in self.peers.items()
            if peer_id != besides and peer.answers(now) and peer.announcement.state != "leaving"
        ]

    def state_of(self, peer_id: str, now: float) -> str:
        """What the peer says of itself, or LOST or SILENT."""
        peer = self.peers[peer_id]
        said: str = peer.announcement.state
        if said == "leaving" or peer.answers(now) or (not peer.is_failing and peer.heard_at is None):
            return said
        if peer.withheld:
            return said
        witnesses = self.witnesses(now, besides=peer_id)
        if any(peer_id in other.sees for other in witnesses):
            peer.was_told_of = True
            return said
        # A peer that has just come, or come back, may be in the DHT before it has any channel.
        if peer.is_coming_back(now) or (said == "joining" and not peer.was_told_of):
            return said
        return LOST if witnesses or (peer.heard_at is not None and peer.is_failing) else SILENT

    def note(self, now: float, unix_now: float, *, silently: bool = False) -> None:
        """Record what has become of each peer since the last call, and forget those that have been gone for long.
        `silently`: record no event for peers that are there now.
        """
        for peer_id, peer in list(self.peers.items()):
            state = self.state_of(peer_id, now)
            if not silently and (what := _event(peer.shown_state, state)) is not None:
                self.events.append(Event(unix_now, peer.announcement.world_rank, what))
            gone = state in (LOST, SILENT, "leaving")
            peer.lost_at = (now if peer.lost_at is None else peer.lost_at) if gone else None
            peer.shown_state = state
            if self._is_forgotten(peer, now, unix_now):
                del self.peers[peer_id]

    def _is_forgotten(self, peer: Observation, now: float, unix_now: float) -> bool:
        if not peer.was_told_of and not peer.answers(now):
            return unix_now - peer.announcement.time > NEVER_MET_S
        return peer.lost_at is not None and now - peer.lost_at > FORGET_S

    def shown(self) -> Mapping[str, Observation]:
        """Everybody but those who have left."""
        return {i: peer for i, peer in self.peers.items() if peer.announcement.state != "leaving"}


def _new(told: Iterable[T], known: Sequence[T], latest: float) -> list[T]:
    """The reported entries that are later than all known ones, but not later than `latest`."""
    last = known[-1].time if known else 0.0
    return [entry for entry in told if last < entry.time <= latest]


def _event(before: str, after: str) -> str | None:
    gone = (LOST, SILENT, "leaving", "")
    if before == after:
        return None
    if after == LOST:
        return "was lost" if before else None
    if after == SILENT:
        return "does not answer" if before else None
    if after == "leaving":
        return "left" if before and before not in gone else None
    if before in (LOST, SILENT, "leaving"):
        return "came back"
    return "joined" if not before else None
