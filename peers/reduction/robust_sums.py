"""The rules of peers/round/aggregation.py that hold all members' values at once, by compiled loops."""

from __future__ import annotations

import numpy as np

from peers.reduction.kernels import Floats, centered_clip, trimmed_mean

TRIM_SHARE = 0.2
"""Of the members, what is left out on either side; one at least."""
CLIP_ITERATIONS = 3


def combine(rule: str, rows: Floats, weights: Floats, total: Floats) -> None:
    """What these members' values come to, in `total`: fp32 [n], `rows` [members, n], `weights` [members]."""
    if rule == "trimmed-mean":
        trimmed_mean(rows, weights, max(1, int(TRIM_SHARE * len(rows))), total)
    else:
        centered_clip(rows, weights, CLIP_ITERATIONS, total)


def rows_for(num_members: int, numel: int) -> Floats:
    """Room for every member's values of a share."""
    return np.empty((num_members, numel), np.float32)
