"""Who is there, and does not come to rounds: waited for a few times, and not for ever."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peers.membership import View

TOLERATED = 8
"""Rounds in a row that a peer is waited for in vain: in fewer a leader does not learn how late others are."""
AGAIN_EVERY = 16
"""Epochs, after which it is waited for once more: who is a little slower than the others would be too late for ever."""


class Absences:
    """By peer id, so that a restart or another world rank changes nothing."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def note(self, view: View, expected: Iterable[int], members: Collection[int]) -> None:
        """A round of these members has been committed; these ranks were `expected` to be among them."""
        absent = [view[rank].peer_id for rank in expected if rank not in members]
        self._in_a_row = {peer_id: self._in_a_row.get(peer_id, 0) + 1 for peer_id in absent}

    def unawaited(self, view: View, epoch: int) -> list[int]:
        """World ranks of those who have not come too often; one round that they are in, and they are waited for."""
        return [
            rank
            for rank, peer in view.items()
            if self._in_a_row.get(peer.peer_id, 0) >= TOLERATED and (epoch + rank) % AGAIN_EVERY
        ]
