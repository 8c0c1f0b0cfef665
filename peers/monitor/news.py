"""What changed in a swarm between two looks at its announcements, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.protocol.records import MAX_AGE_S, Announcement, shown_rank
from peers.timing import LOOK_S, RECORD_TTL_S

LOST_AFTER_S = RECORD_TTL_S + LOOK_S
"""A peer whose announcement has not been renewed for so long counts as lost: a live one renews it before it expires,
which the next look shows."""


@dataclass
class Watcher:
    """Remembers which peers were there. Times are arguments, in seconds of any one clock."""

    _present: dict[str, tuple[Announcement, float]] = field(default_factory=dict)
    _newest: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By peer id: the time of its newest record, and when a record was seen last."""
    _gone: dict[str, int] = field(default_factory=dict)
    """By peer id: the incarnation in which the peer left."""
    _epoch: int = 0
    _reached_by: frozenset[tuple[str, int]] = frozenset()
    """Peer ids and incarnations of the peers that were there when `_epoch` was reached."""

    def update(self, announcements: Mapping[str, Announcement], now_s: float) -> list[str]:
        """One line for each peer that joined, left or was lost and for each epoch reached since the last call.

        A peer that is still joining is not reported, since it may be refused, nor is a record that is missing for a
        moment. A record that is not newer than the last one is no sign of life.
        """
        renewed = []
        for peer_id, announcement in sorted(announcements.items(), key=lambda item: item[1].world_rank):
            newest, _ = self._newest.get(peer_id, (float("-inf"), now_s))
            if announcement.time > newest:
                renewed.append((peer_id, announcement))
            self._newest[peer_id] = max(announcement.time, newest), now_s
        lines = [line for found in renewed for line in self._came(*found, now_s)]
        lines += [line for found in renewed for line in self._left(*found)]
        lines += self._lost(now_s)
        lines += self._reached()
        # Anybody can make up peers.
        self._newest = {
            peer_id: seen for peer_id, seen in self._newest.items() if now_s - seen[1] <= MAX_AGE_S
        }
        self._gone = {peer_id: left for peer_id, left in self._gone.items() if peer_id in self._newest}
        return lines

    def _came(self, peer_id: str, announcement: Announcement, now_s: float) -> list[str]:
        before, _ = self._present.get(peer_id, (None, 0.0))
        if announcement.state == "joining" and before is None:
            return []
        if announcement.state == "leaving":
            # A peer that left before it was ever seen is reported as joined, if it took part in an epoch.
            is_told = before is not None or self._gone.get(peer_id) == announcement.incarnation
            if is_told or announcement.epoch == 0:
                return []
        self._present[peer_id] = (announcement, now_s)
        if before is None:
            return [f"{_name(announcement)} joined, {self._count()}"]
        if before.incarnation != announcement.incarnation:
            return [f"{_name(announcement)} came back, {self._count()}"]
        return []

    def _left(self, peer_id: str, announcement: Announcement) -> list[str]:
        if announcement.state != "leaving" or self._present.pop(peer_id, None) is None:
            return []
        self._gone[peer_id] = announcement.incarnation
        return [f"{_name(announcement)} left at epoch {announcement.epoch}, {self._count()}"]

    def _lost(self, now_s: float) -> list[str]:
        lines = []
        for peer_id, (announcement, seen_s) in list(self._present.items()):
            if now_s - seen_s > LOST_AFTER_S:
                del self._present[peer_id]
                silence = f"silent for {now_s - seen_s:.0f} s"
                lines.append(f"{_name(announcement)} is lost: {silence}, {self._count()}")
        return lines

    def _reached(self) -> list[str]:
        epoch = max((announcement.epoch for announcement, _ in self._present.values()), default=0)
        present = frozenset((peer_id, said.incarnation) for peer_id, (said, _) in self._present.items())
        if not present & self._reached_by:
            # Nobody is left of the peers that reached `_epoch`, and new peers may begin the run anew.
            self._epoch = min(self._epoch, epoch)
        if epoch <= self._epoch:
            return []
        self._epoch, self._reached_by = epoch, present
        speed = sum(announcement.tokens_per_s for announcement, _ in self._present.values())
        return [f"epoch {epoch}: {self._count()}, {speed:,.0f} tokens/s"]

    def _count(self) -> str:
        number = len(self._present)
        return f"{number} peer{'s' if number != 1 else ''}"


def _name(announcement: Announcement) -> str:
    return f"peer {shown_rank(announcement.world_rank)} (…{announcement.peer_id[-6:]})"
