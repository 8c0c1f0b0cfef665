"""The time of a round by its links alone, and its minimum over all shares, to compare peers/reduce/shares.py with."""

from __future__ import annotations

import math
from collections.abc import Sequence


def round_seconds(bandwidths: Sequence[float], bounds: Sequence[int], value_bytes: float = 4.0) -> float:
    """The least time of a round with these bounds, by the links alone. `value_bytes`: bytes on the wire per value."""
    spread = len(bandwidths) - 2
    size = value_bytes * bounds[-1]
    return max(
        (size + spread * value_bytes * (stop - start)) / bandwidth
        for bandwidth, start, stop in zip(bandwidths, bounds, bounds[1:], strict=False)
    )


def optimal_seconds(bandwidths: Sequence[float], num_bytes: float) -> float:
    """T*: the least time of a round over all shares, on links of so many bytes/s; `num_bytes` is D."""
    count, descending = len(bandwidths), sorted(bandwidths, reverse=True)
    slowest = num_bytes / descending[-1]
    if count == 2:
        return slowest
    # One level for each number k of owners, which are the k fastest. The right number has the lowest level.
    levels = ((count - 2 + k) / math.fsum(descending[:k]) for k in range(1, count + 1))
    return max(slowest, num_bytes * min(levels))
