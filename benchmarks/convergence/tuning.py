"""The best rate on one seed, by walking downhill."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MAX_RUNS = 8
_UNIT = 1e-3


def best_rate(start: float, neighbours: Callable[[float], tuple[float, float]], losses: Losses) -> float:
    """The rate whose loss is below both its neighbours', from `start` on; or the best of those tried, at the limit.

    `losses` is given several rates at once, so that they may be tried in parallel, and may be asked for one again.
    """
    known: dict[float, float] = {}
    best = start
    while len(known) < MAX_RUNS:
        wanted = [rate for rate in (best, *neighbours(best)) if rate not in known]
        if not wanted:
            break
        known |= dict(zip(wanted, losses(wanted), strict=True))
        best = min(known, key=lambda rate: known[rate])
    return best


Losses = Callable[[Sequence[float]], Sequence[float]]


def by_factors(rate: float) -> tuple[float, float]:
    """Less and more by the root of two, from a rate of 0.001 x 2^(n/2) on: a way there and back ends where it began."""
    level = round(2 * math.log2(rate / _UNIT))
    return _UNIT * 2 ** ((level - 1) / 2), _UNIT * 2 ** ((level + 1) / 2)


def by_steps(rate: float) -> tuple[float, float]:
    """0.2 less and more, as in the sweep of arXiv 2503.09799; from 0.2 down by halves."""
    return (round(rate - 0.2, 3) if rate > 0.2 else rate / 2, round(rate + 0.2, 3))
