"""Members whose pseudo-gradients point the same way: they seem to train on the same data, so that one adds nothing.

The owner of a share has all members' values of it, and compares its own first ones with theirs. People are told;
nothing is decided by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from peers.reduce.kernels import Floats

SAMPLE_NUMEL = 4096
"""Values of a share that are compared: the cosine of unrelated ones lies within 0.05 of zero then."""
_LEAST_NUMEL = 256
PARALLEL = 0.98
"""The cosine from which on two members count as parallel. On unlike data the noise of each one's batches, which is most
of a pseudo-gradient, keeps them well below."""
ENOUGH_COMMITS = 3
"""In a row: in the first epochs everybody learns the same simple things."""


class Samples:
    """Of one attempt, the first values of this peer's share, by member's index."""

    def __init__(self) -> None:
        self._rows: dict[int, Floats] = {}

    def take(self, member: int, values: Floats) -> None:
        """`values`: a member's decoded values of the share's first chunk."""
        self._rows[member] = values[:SAMPLE_NUMEL].copy()

    def parallel_to(self, me: int) -> tuple[int, ...]:
        """The members, by index, whose values point where mine do."""
        mine = self._rows.get(me)
        if mine is None or mine.size < _LEAST_NUMEL:
            return ()
        return tuple(i for i, row in sorted(self._rows.items()) if i != me and _cosine(mine, row) >= PARALLEL)


class Likeness:
    """Over the commits of one peer: whose work was parallel to its own in the last ones."""

    def __init__(self) -> None:
        self._in_a_row: Counter[int] = Counter()

    def committed(self, parallel: Iterable[int]) -> None:
        """`parallel`: world ranks."""
        self._in_a_row = Counter({rank: self._in_a_row[rank] + 1 for rank in parallel})

    @property
    def world_ranks(self) -> list[int]:
        return sorted(rank for rank, count in self._in_a_row.items() if count >= ENOUGH_COMMITS)


def _cosine(a: Floats, b: Floats) -> float:
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / norms if norms > 0 else 0.0
