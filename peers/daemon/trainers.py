"""Notices which of the peers that train are lost, and which come back."""

from __future__ import annotations

from peers.protocol.records import TRAINING_STATES, View


class Trainers:
    def __init__(self) -> None:
        self._ranks: dict[str, int] = {}
        """World ranks by peer id."""
        self._lost: set[int] = set()

    def seen(self, view: View) -> tuple[list[int], list[int]]:
        """The world ranks that were lost since the last call, and those that had been lost and are back."""
        lost = sorted(rank for peer_id, rank in self._ranks.items() if peer_id not in view)
        self._ranks = {p: peer.world_rank for p, peer in view.items() if peer.state in TRAINING_STATES}
        back = sorted(self._lost.intersection(self._ranks.values()))
        self._lost = self._lost.union(lost).difference(back)
        return lost, back
