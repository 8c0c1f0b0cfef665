"""What a peer has committed since it last missed others: its work, should that be the losing side of a fork.

A partition: each side goes on, and when they meet, everybody goes on from the state on which more was trained. The
other side's commits since the split are work too. Its members take the sum of the averages that they have committed
into what they propose next, each for the tokens of its own in them: as if that epoch of theirs had begun at the split.
So the outer step makes of it what it makes of any other work, with the other side's momentum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from peers.state.header import MAX_ANCESTORS


class Branch:
    """Of one peer. While a member of an earlier group is missed it takes as much memory as the anchor, else none."""

    def __init__(self) -> None:
        self._members: frozenset[int] = frozenset()
        self._missed: frozenset[int] = frozenset()
        self._since = ""
        self._num_commits = 0
        self._sums: dict[int, Tensor] = {}

    def clear(self) -> None:
        """The state comes from elsewhere."""
        self.__init__()  # type: ignore[misc]

    def left(self, ranks: Collection[int]) -> None:
        """These have taken their leave: they train nowhere else."""
        self._members -= frozenset(ranks)
        self._missed -= frozenset(ranks)

    def committing(self, ranks: Collection[int], lineage: str, fragment: int, average: Tensor) -> None:
        """These members are about to commit this average on this lineage.

        A sum begins with the first commit that lacks somebody, and anew whenever somebody else is missed: from there
        on this side may be on its own.
        """
        members = frozenset(ranks)
        newly = self._members - members
        self._missed, self._members = (self._missed | newly) - members, members
        if newly:
            self._since, self._num_commits, self._sums = lineage, 0, {}
        if not self._missed or self._num_commits >= MAX_ANCESTORS:
            self._since, self._sums = "", {}
        if self._since:
            self._num_commits += 1
            if fragment in self._sums:
                self._sums[fragment] += average
            else:
                self._sums[fragment] = average.clone()

    def set_aside(self, path: Sequence[str], tokens_by_commit: Mapping[str, tuple[int, int]]) -> Aside:
        """What is lost, and what is not, where everybody goes on from another state than this path leads to.

        `path` goes from the lineage at the split to this peer's; `tokens_by_commit`: of the commit made on each
        lineage, its fragment and this peer's tokens in it.
        """
        known = path[path.index(self._since) :] if self._since in path else ()
        return Aside(
            num_commits=max(0, len(path) - 1),
            tokens=_by_fragment(path[:-1], tokens_by_commit),
            brought=_by_fragment(known[:-1], tokens_by_commit),
            sums=self._sums if known else {},
        )


@dataclass(frozen=True, kw_only=True)
class Aside:
    """The commits of the losing side of a fork, as one of its members sees them. Tokens are its own, by fragment."""

    num_commits: int
    tokens: Counter[int]
    brought: Counter[int]
    """Those of them whose work is in the sums."""
    sums: Mapping[int, Tensor]
    """Of averaged pseudo-gradients, by fragment."""


def _by_fragment(lineages: Sequence[str], tokens_by_commit: Mapping[str, tuple[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for lineage in lineages:
        if lineage in tokens_by_commit:
            fragment, tokens = tokens_by_commit[lineage]
            total[fragment] += tokens
    return total
