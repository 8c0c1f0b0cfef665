"""The rules (peers/protocol/rules.py) that hold all members' values at once, by compiled loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peers.protocol.rules import num_trimmed
from peers.reduce.kernels import Floats, centered_clip, trimmed_mean

CLIP_ITERATIONS = 3


def combine(rule: str, trim: float, rows: Floats, weights: Floats, total: Floats) -> None:
    """What these members' values come to, in `total`: fp32 [n], `rows` [members, n], `weights` [members]."""
    if rule == "trimmed-mean":
        trimmed_mean(rows, weights, num_trimmed(trim, len(rows)), total)
    else:
        centered_clip(rows, weights, CLIP_ITERATIONS, total)


def norm_bound(rule: str, trim: float, norms: Sequence[float]) -> float:
    """The largest L2 norm of what `combine` makes of values of these norms at most; the longest have no say in it.

    What k members' values are cut off at either side of lies, for every value, within what all but any k bring. So the
    trimmed mean, and the median that the centre begins at, are no longer than the others' norms together; from there
    each iteration moves by no more than the median distance, which is one of those norms and the centre's at most, and
    never beyond all of them.
    """
    count, ascending = len(norms), sorted(norms)
    if rule == "trimmed-mean":
        return sum(ascending[: count - num_trimmed(trim, count)])
    median = sum(ascending[: count - (count - 1) // 2])
    return min(sum(ascending), (2 ** (CLIP_ITERATIONS + 1) - 1) * median)


def rows_for(num_members: int, numel: int) -> Floats:
    """Room for every member's values of a share."""
    return np.empty((num_members, numel), np.float32)
