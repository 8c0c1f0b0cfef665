"""Whose word counts: peers that announce a state which they do not hand over are passed over for a while.

Anybody can announce more committed tokens than all others have. Who cannot deliver must not keep the others from
training, and who could not deliver for once must not be lost for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from peers.membership import View

PATIENCE_S = 10.0
"""For so long a state that does not come is asked for again."""
_FIRST_BREAK_S = 30.0
_LONGEST_BREAK_S = 600.0


class Credit:
    """What this peer has seen of others, by peer id. All times in seconds of any one clock."""

    def __init__(self) -> None:
        self._failing_since: dict[str, float] = {}
        self._ignored_until: dict[str, float] = {}
        self._num_breaks: Counter[str] = Counter()

    def failed(self, peer_ids: Iterable[str], asked_at: float, now: float) -> None:
        """These peers were asked for a state and did not hand it over."""
        for peer_id in peer_ids:
            if now - self._failing_since.setdefault(peer_id, asked_at) < PATIENCE_S:
                continue
            del self._failing_since[peer_id]
            break_s = min(_FIRST_BREAK_S * 2 ** self._num_breaks[peer_id], _LONGEST_BREAK_S)
            self._num_breaks[peer_id] += 1
            self._ignored_until[peer_id] = now + break_s

    def delivered(self, peer_ids: Iterable[str]) -> None:
        """A state came that these peers were asked for."""
        for peer_id in peer_ids:
            self._failing_since.pop(peer_id, None)
            self._num_breaks.pop(peer_id, None)

    def credible(self, view: View, lineage: str, now: float) -> View:
        """The view without those that are passed over. Whoever is on our own lineage has nothing to deliver."""
        return {
            rank: peer
            for rank, peer in view.items()
            if peer.lineage == lineage or self._ignored_until.get(peer.peer_id, 0.0) <= now
        }
