"""What rounds take by the links alone, and the least that they can take: to compare peers/reduce/shares.py with."""

from __future__ import annotations

import math
from collections.abc import Sequence


def round_seconds(bandwidths: Sequence[float], bounds: Sequence[int], value_bytes: float = 4.0) -> float:
    """What a round with these bounds takes at least, by the links alone; `value_bytes` on the wire per value."""
    spread = len(bandwidths) - 2
    size = value_bytes * bounds[-1]
    return max(
        (size + spread * value_bytes * (stop - start)) / bandwidth
        for bandwidth, start, stop in zip(bandwidths, bounds, bounds[1:], strict=False)
    )


def optimal_seconds(bandwidths: Sequence[float], num_bytes: float) -> float:
    """T*: the least that a round can take on links of so many bytes/s, whatever the shares; `num_bytes` is D."""
    count, descending = len(bandwidths), sorted(bandwidths, reverse=True)
    slowest = num_bytes / descending[-1]
    if count == 2:
        return slowest
    # With the k fastest as owners the level is levels[k]; with fewer or more than there should be, it is higher.
    levels = ((count - 2 + k) / math.fsum(descending[:k]) for k in range(1, count + 1))
    return max(slowest, num_bytes * min(levels))
