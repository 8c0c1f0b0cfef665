"""Whose word counts: peers that announce a state which they do not hand over are passed over for a while.

Anybody can announce more committed tokens than all others have. Who cannot deliver must not keep the others from
training, and who could not deliver for once must not be lost for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from peers.membership import View

PATIENCE_S = 10.0
"""For so long a state that does not come is asked for again."""
_FIRST_BREAK_S = 30.0
_LONGEST_BREAK_S = 600.0
_FIRST_SHARE, _LONGEST_SHARE = 2.0, 16.0
"""Times what was lost to it alone, if that is longer: a download that trickles takes all rounds' time."""
MAX_REMEMBERED = 1024
"""Peers; beyond that the one that failed longest ago is forgotten."""


@dataclass
class _Failing:
    since: float
    """Without a pause."""
    last: float
    ignored_until: float = 0.0
    num_breaks: int = 0


class Credit:
    """What this peer has seen of others, by peer id. All times in seconds of any one clock."""

    def __init__(self) -> None:
        self._failing: dict[str, _Failing] = {}

    def failed(self, peer_ids: Iterable[str], asked_at: float, now: float) -> None:
        """These peers were asked for a state and did not hand it over."""
        asked = set(peer_ids)
        for peer_id in asked:
            record = self._failing.pop(peer_id, _Failing(asked_at, asked_at))
            self._failing[peer_id] = record
            # After a pause, and after it was passed over for what came before, it begins anew.
            if asked_at - record.last >= PATIENCE_S or record.last < record.ignored_until:
                record.since = asked_at
            record.last = now
            if now - record.since < PATIENCE_S:
                continue
            # Of several one alone may have kept the others from handing it over.
            lost_s = now - record.since if len(asked) == 1 else 0.0
            first_s = max(_FIRST_BREAK_S, _FIRST_SHARE * lost_s)
            longest_s = max(_LONGEST_BREAK_S, _LONGEST_SHARE * lost_s)
            record.ignored_until = now + min(first_s * 2**record.num_breaks, longest_s)
            record.num_breaks += 1
        while len(self._failing) > MAX_REMEMBERED:
            del self._failing[next(iter(self._failing))]

    def delivered(self, peer_ids: Iterable[str]) -> None:
        """A state came that these peers were asked for."""
        for peer_id in peer_ids:
            self._failing.pop(peer_id, None)

    def credible(self, view: View, lineage: str, now: float) -> View:
        """The view without those that are passed over. Whoever is on our own lineage has nothing to deliver."""
        ignored = {peer_id for peer_id, record in self._failing.items() if now < record.ignored_until}
        return {
            rank: peer
            for rank, peer in view.items()
            if peer.lineage == lineage or peer.peer_id not in ignored
        }
