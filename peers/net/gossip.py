"""Every peer's newest announcement, and which of them each neighbour has yet to be sent. Pure.

A peer sends its announcements, signed and numbered, to its neighbours (overlay.py), and each passes them on to certain
neighbours of its own. A peer misses some when the ring has just changed or a link is down. It gets them by asking one
neighbour after another for what it lacks (anti-entropy, Demers et al., 1987). A peer is *here* while newer
announcements of it come. It is no longer here once the channel to it breaks, or more than half of its neighbours report
that theirs broke (SWIM's indirect probes, Das et al., 2002), or nothing new has come for long. A live peer that hears
that it is reported lost sends a newer announcement, which ends the rumour (as in SWIM, too).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from peers.net.overlay import Ring, is_full_mesh, place_of
from peers.protocol.mesh import KEY_BYTES, MAX_NEWS, Told
from peers.protocol.records import MAX_LOST, MAX_SPOKEN_BYTES, Lost, Spoken
from peers.timing import PROBE_S, START_S

MAX_KNOWN = 4096
_NOTHING = (-1, 0)
"""Older than every version."""


@dataclass
class _Known:
    """The newest announcement of one peer, here or not."""

    spoken: Spoken
    record: bytes
    heard_at: float


class Gossip:
    """`here`: the newest announcement of every other peer that is here."""

    def __init__(self, me: str) -> None:
        self._me = me
        self.here: dict[str, Spoken] = {}
        self._known: dict[str, _Known] = {}
        self._owed: dict[str, dict[str, None]] = {}
        """By neighbour, the peers whose newest announcement it has yet to be sent."""
        self._lost: dict[str, tuple[Lost, float]] = {}
        """Peers whose channel to this one broke, and when."""
        self._reports: dict[str, dict[str, Lost]] = defaultdict(dict)
        """By peer, who reports that it is lost."""
        self._announced: frozenset[str] = frozenset()
        self._ring: Ring | None = None
        """Of this peer and all that are here; None: to be computed again."""

    @property
    def is_full_mesh(self) -> bool:
        """Whether all peers have channels with one another, so that nothing has to be passed on. Announced peers count,
        too: if many come at once, each hears few of them at first."""
        return is_full_mesh(1 + len(self.here.keys() | self._announced))

    def announced(self, peer_ids: Collection[str]) -> None:
        """These peers are announced in the DHT."""
        self._announced = frozenset(peer_ids) - {self._me}

    def newest(self, peer_id: str) -> Spoken | None:
        """The newest announcement of `peer_id`, whether it is here or not."""
        known = self._known.get(peer_id)
        return known.spoken if known else None

    @property
    def neighbours(self) -> frozenset[str]:
        """The neighbours of this peer among all that are here."""
        return self.ring.neighbours_of(self._me)

    def neighbours_with(self, further: Collection[str]) -> frozenset[str]:
        """The neighbours that this peer would have if these were here too."""
        return self.ring.with_(further).neighbours_of(self._me)

    @property
    def ring(self) -> Ring:
        if self._ring is None:
            self._ring = Ring({self._me, *self.here})
        return self._ring

    # What is heard

    def is_news(self, peer_id: str, version: tuple[int, int]) -> bool:
        known = self._known.get(peer_id)
        return peer_id != self._me and (known is None or version > known.spoken.version)

    def heard(self, spoken: Spoken, record: bytes, now: float, by: str) -> bool:
        """Take an announcement, its signature verified, from the channel of `by`. Returns whether it is news."""
        peer_id, is_direct = spoken.peer_id, spoken.peer_id == by
        if not self.is_news(peer_id, spoken.version):
            if is_direct:
                self._arrived(peer_id, self._known[peer_id].spoken)
            return False
        if peer_id not in self._known and not self._make_room():
            return False
        self._known[peer_id] = _Known(spoken, record, now)
        reports = self._reports.get(peer_id, {})
        self._reports[peer_id] = {by: lost for by, lost in reports.items() if lost.version >= spoken.version}
        if not is_direct and self._has_just_lost(peer_id, now):
            # Probably sent before the loss. The peer is back once a channel to it opens or a later announcement comes.
            self._lost[peer_id] = _lost(spoken), self._lost[peer_id][1]
            return False
        if not is_direct and self._is_reported(spoken):
            return False
        if self._owed:
            told = self.ring.with_({peer_id}).told_by(self._me, peer_id) - {by}
            for neighbour in told & self._owed.keys():
                self._owed[neighbour][peer_id] = None
        for lost in spoken.lost:
            if lost.peer_id in self._known or lost.peer_id == self._me:
                self._reports[lost.peer_id][peer_id] = lost
        self._arrived(peer_id, spoken)
        return True

    def _arrived(self, peer_id: str, spoken: Spoken) -> None:
        if peer_id not in self.here:
            self._ring = None
        self.here[peer_id] = spoken
        self._lost.pop(peer_id, None)

    def _has_just_lost(self, peer_id: str, now: float) -> bool:
        return peer_id in self._lost and now < self._lost[peer_id][1] + PROBE_S

    # Who is lost

    def lose(self, peer_id: str, now: float, *, by_own_channel: bool) -> bool:
        """`peer_id` is not here any more. Returns whether it was."""
        spoken = self.here.pop(peer_id, None)
        if spoken is None:
            return False
        self._ring = None
        if by_own_channel:
            self._lost[peer_id] = _lost(spoken), now
        for owed in self._owed.values():
            owed.pop(peer_id, None)
        return True

    def lost_lately(self, now: float) -> tuple[Lost, ...]:
        """Recent losses, for this peer's announcement; empty in a full mesh, where every peer notices them itself."""
        self._lost = {p: (lost, at) for p, (lost, at) in self._lost.items() if now < at + START_S}
        return () if self.is_full_mesh else tuple(lost for lost, _ in list(self._lost.values())[-MAX_LOST:])

    def rumoured(self, spoken: Spoken) -> set[str]:
        """The peers that this announcement reports lost, and that most of their neighbours report lost."""
        named = (self.here.get(lost.peer_id) for lost in spoken.lost)
        return {one.peer_id for one in named if one is not None and self._is_reported(one)}

    def _is_reported(self, spoken: Spoken) -> bool:
        """Whether most neighbours of the announcing peer report it lost although they have heard this announcement."""
        neighbours = self.ring.with_({spoken.peer_id}).neighbours_of(spoken.peer_id)
        reports = self._reports[spoken.peer_id].items()
        agree = sum(reporter in neighbours and lost.version >= spoken.version for reporter, lost in reports)
        return 2 * agree > len(neighbours)

    def silent(self, now: float, silence_s: float) -> set[str]:
        """The peers here of which nothing new has come for this long."""
        return {peer_id for peer_id in self.here if now > self._known[peer_id].heard_at + silence_s}

    # What neighbours are owed

    def versions(self) -> dict[bytes, tuple[int, int]]:
        """The versions that this peer has of those that are here, to ask a neighbour for what is missing."""
        return {key_of(peer_id): spoken.version for peer_id, spoken in self.here.items()}

    def missing(
        self, to: str, versions: Mapping[bytes, tuple[int, int]], heard_before: float
    ) -> tuple[Told, ...]:
        """One message of what `to` lacks, which holds these versions. What was heard after `heard_before` is left out:
        it is still on its way to `to`."""
        return _message(
            known
            for peer_id in self.here
            if peer_id != to
            and (known := self._known[peer_id]).heard_at < heard_before
            and versions.get(key_of(peer_id), _NOTHING) < known.spoken.version
        )

    def due(self, neighbours: Collection[str]) -> Iterator[tuple[str, tuple[Told, ...]]]:
        """For each of these neighbours that has yet to be sent something: one message of it."""
        self._owed = {n: self._owed[n] if n in self._owed else dict.fromkeys(self.here) for n in neighbours}
        for neighbour, owed in self._owed.items():
            owed.pop(neighbour, None)
            if told := _message(self._known[owed.popitem()[0]] for _ in range(len(owed))):
                yield neighbour, told

    @property
    def is_owed(self) -> bool:
        return any(self._owed.values())

    def _make_room(self) -> bool:
        if len(self._known) < MAX_KNOWN:
            return True
        gone = next((peer_id for peer_id in self._known if peer_id not in self.here), None)
        if gone is None:
            return False
        del self._known[gone]
        self._reports.pop(gone, None)
        return True


def key_of(peer_id: str) -> bytes:
    """Short for a peer id in a list of versions. If two peers share one, missed announcements may stay missing."""
    return place_of(peer_id)[:KEY_BYTES]


def _message(words: Iterable[_Known]) -> tuple[Told, ...]:
    """As many of these as fit into a message; no more are taken from the iterable."""
    told, size = list[Told](), 0
    for known in words:
        told.append(_told(known))
        size += len(known.record)
        if len(told) >= MAX_NEWS or size >= MAX_SPOKEN_BYTES // 2:
            break
    return tuple(told)


def _lost(spoken: Spoken) -> Lost:
    return Lost(peer_id=spoken.peer_id, incarnation=spoken.incarnation, number=spoken.number)


def _told(known: _Known) -> Told:
    spoken = known.spoken
    return Told(
        peer_id=spoken.peer_id, incarnation=spoken.incarnation, number=spoken.number, record=known.record
    )
