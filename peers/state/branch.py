"""What a peer has committed since it last missed others: its work, should that be the losing side of a fork.

A partition: each side goes on, and when they meet, everybody goes on from the state on which more was trained. The
other side's commits since the split are work too. Its members take the sum of the averages that they have committed
into what they propose next, each for the tokens of its own in them: as if that epoch of theirs had begun at the split.
So the outer step makes of it what it makes of any other work, with the other side's momentum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from peers.state.header import MAX_ANCESTORS


@dataclass(frozen=True, kw_only=True)
class Aside:
    """The commits of the losing side of a fork, as one of its members sees them."""

    num_commits: int = 0
    num_brought: int = 0
    """Of the last of them the work is known."""
    tokens: Counter[int] = field(default_factory=Counter)
    """This peer's own in those, by fragment."""
    sums: Mapping[int, Tensor] = field(default_factory=dict)
    """Of their averaged pseudo-gradients, by fragment."""


class Branch:
    """Of one peer. While a member of an earlier group is missed it takes as much memory as the anchor, else none."""

    def __init__(self) -> None:
        self._members: frozenset[int] = frozenset()
        self._missed: frozenset[int] = frozenset()
        self._begin("")

    def _begin(self, since: str) -> None:
        """A sum of what is committed from this lineage on; empty: none."""
        self._since, self._num_commits = since, 0
        self._tokens: Counter[int] = Counter()
        self._sums: dict[int, Tensor] = {}

    def left(self, ranks: Collection[int]) -> None:
        """These have taken their leave: they train nowhere else."""
        self._members -= frozenset(ranks)
        self._missed -= frozenset(ranks)

    def moved(self, lineage: str, members: Collection[int]) -> None:
        """The state comes from others now, of whom these are here. Who was missed and is not among them still is."""
        self._members = frozenset(members)
        self._missed -= self._members
        self._begin(lineage if self._missed else "")

    def committing(
        self, ranks: Collection[int], lineage: str, fragment: int, average: Tensor, *, tokens: int
    ) -> None:
        """These members are about to commit this average on this lineage, with so many tokens of this peer's.

        A sum begins with the first commit that lacks somebody, and anew whenever somebody else is missed: from there
        on this side may be on its own.
        """
        members = frozenset(ranks)
        newly = self._members - members
        self._missed, self._members = (self._missed | newly) - members, members
        if newly:
            self._begin(lineage)
        elif not self._missed or self._num_commits >= MAX_ANCESTORS:
            self._begin("")
        if self._since:
            self._num_commits += 1
            self._tokens[fragment] += tokens
            if fragment in self._sums:
                self._sums[fragment] += average
            else:
                self._sums[fragment] = average.clone()

    def set_aside(self, path: Sequence[str]) -> Aside:
        """What becomes of this side, where everybody goes on from another state than this path leads to.

        `path` goes from the lineage at the split to this peer's; empty: there was no split.
        """
        if self._since not in path:
            return Aside(num_commits=len(path[1:]))
        num_brought = len(path) - 1 - path.index(self._since)
        return Aside(num_commits=len(path) - 1, num_brought=num_brought, tokens=self._tokens, sums=self._sums)
