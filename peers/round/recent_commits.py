"""The last commits that led to the state a peer holds: what it can tell others who have missed one of them."""

from __future__ import annotations

from peers.round.messages import Commit

MAX_COMMITS = 64
"""Whoever was away for longer catches up without knowing whether its last work is in."""


class RecentCommits:
    """Newest last. Every one of them is in the current state: `clear` when that comes from elsewhere."""

    def __init__(self) -> None:
        self._by_lineage: dict[str, Commit] = {}

    @property
    def newest(self) -> Commit | None:
        return next(reversed(self._by_lineage.values()), None)

    def on(self, lineage: str) -> Commit | None:
        """How this lineage went on."""
        return self._by_lineage.get(lineage)

    def add(self, commit: Commit) -> None:
        self._by_lineage[commit.lineage] = commit
        while len(self._by_lineage) > MAX_COMMITS:
            del self._by_lineage[next(iter(self._by_lineage))]

    def clear(self) -> None:
        self._by_lineage.clear()
