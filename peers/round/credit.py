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
_FIRST_SHARE, _LONGEST_SHARE = 2.0, 16.0
"""Times what was lost to it alone, if that is longer: a download that trickles takes all rounds' time."""


class Credit:
    """What this peer has seen of others, by peer id. All times in seconds of any one clock."""

    def __init__(self) -> None:
        # When it began to fail without a pause, and when it last did.
        self._failing: dict[str, tuple[float, float]] = {}
        self._ignored_until: dict[str, float] = {}
        self._num_breaks: Counter[str] = Counter()

    def failed(self, peer_ids: Iterable[str], asked_at: float, now: float) -> None:
        """These peers were asked for a state and did not hand it over."""
        asked = set(peer_ids)
        for peer_id in asked:
            since, last = self._failing.get(peer_id, (asked_at, asked_at))
            since = since if asked_at - last < PATIENCE_S else asked_at
            self._failing[peer_id] = since, now
            if now - since < PATIENCE_S:
                continue
            del self._failing[peer_id]
            # Of several one alone may have kept the others from handing it over.
            lost_s = now - since if len(asked) == 1 else 0.0
            first_s = max(_FIRST_BREAK_S, _FIRST_SHARE * lost_s)
            longest_s = max(_LONGEST_BREAK_S, _LONGEST_SHARE * lost_s)
            break_s = min(first_s * 2 ** self._num_breaks[peer_id], longest_s)
            self._num_breaks[peer_id] += 1
            self._ignored_until[peer_id] = now + break_s

    def delivered(self, peer_ids: Iterable[str]) -> None:
        """A state came that these peers were asked for."""
        for peer_id in peer_ids:
            self._failing.pop(peer_id, None)
            self._num_breaks.pop(peer_id, None)

    def credible(self, view: View, lineage: str, now: float) -> View:
        """The view without those that are passed over. Whoever is on our own lineage has nothing to deliver."""
        return {
            rank: peer
            for rank, peer in view.items()
            if peer.lineage == lineage or self._ignored_until.get(peer.peer_id, 0.0) <= now
        }
