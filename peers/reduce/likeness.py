"""Detects members with parallel pseudo-gradients: they seem to train on the same data, so one of them adds nothing.

The owner of a share has all members' values of it, and compares the first of its own with theirs. The result is shown
to people; no decision depends on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from peers.reduce.kernels import Floats

SAMPLE_NUMEL = 4096
"""Values of a share that are compared: with so many, the cosine of unrelated vectors is within 0.05 of zero."""
_LEAST_NUMEL = 256
PARALLEL = 0.98
"""The least cosine of parallel members. On different data the noise of each member's batches, which is most of a
pseudo-gradient, keeps the cosine well below."""
ENOUGH_COMMITS = 3
"""Parallel commits in a row before members are reported: in the first epochs all learn the same simple things."""


class Samples:
    """The first values of this peer's share in one attempt, by member's index."""

    def __init__(self) -> None:
        self._rows: dict[int, Floats] = {}

    def take(self, member: int, values: Floats) -> None:
        """`values`: a member's decoded values of the share's first chunk."""
        self._rows[member] = values[:SAMPLE_NUMEL].copy()

    def parallel_to(self, me: int) -> tuple[int, ...]:
        """The members, by index, whose values are parallel to this peer's."""
        mine = self._rows.get(me)
        if mine is None or mine.size < _LEAST_NUMEL:
            return ()
        return tuple(i for i, row in sorted(self._rows.items()) if i != me and _cosine(mine, row) >= PARALLEL)


class Likeness:
    """Which members' work was parallel to this peer's in its last commits."""

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
