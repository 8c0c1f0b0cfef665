"""The robust aggregation rules (peers/protocol/aggregation.py), which need all members' values at once."""

from __future__ import annotations

from collections.abc import Sequence

from peers.protocol.aggregation import num_trimmed
from peers.reduce.kernels import Floats, centered_clip, trimmed_mean

CLIP_ITERATIONS = 3


def combine(rule: str, trim: float, rows: Floats, weights: Floats, total: Floats) -> None:
    """Combine the members' values into `total`: fp32 [n], `rows` [members, n], `weights` [members]."""
    if rule == "trimmed-mean":
        trimmed_mean(rows, weights, num_trimmed(trim, len(rows)), total)
    else:
        centered_clip(rows, weights, CLIP_ITERATIONS, total)


def norm_bound(rule: str, trim: float, norms: Sequence[float]) -> float:
    """An upper bound on the L2 norm of what `combine` returns for members of these norms. The longest do not raise it.

    With k values trimmed at either end, each value of the trimmed mean lies within the range of the values of all but
    any k members. So the trimmed mean is no longer than the sum of the others' norms, and neither is the median, where
    centered-clip starts. From there each iteration moves the centre by at most the median distance, which is at most
    the norm of one of those members plus that of the centre; and the centre never leaves the range of all members.
    """
    count, ascending = len(norms), sorted(norms)
    if rule == "trimmed-mean":
        return sum(ascending[: count - num_trimmed(trim, count)])
    median = sum(ascending[: count - (count - 1) // 2])
    return min(sum(ascending), (2 ** (CLIP_ITERATIONS + 1) - 1) * median)
