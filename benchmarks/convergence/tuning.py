"""Finds the best learning rate on one seed by local search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

MAX_RUNS = 8
_UNIT = 1e-3


def best_rate(start: float, neighbours: Callable[[float], tuple[float, float]], losses: Losses) -> float:
    """A rate with a lower loss than both its neighbours, searched from `start`; the best one after MAX_RUNS rates.

    `losses` gets several rates at once, so that it can run them in parallel.
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
    """The neighbours on the grid 0.001 x 2^(n/2). On a fixed grid the search returns exactly to rates it has tried."""
    level = round(2 * math.log2(rate / _UNIT))
    return _UNIT * 2 ** ((level - 1) / 2), _UNIT * 2 ** ((level + 1) / 2)


def by_steps(rate: float) -> tuple[float, float]:
    """Neighbours at a distance of 0.2, as in the sweep of arXiv 2503.09799; from 0.2 down, half the rate."""
    return (round(rate - 0.2, 3) if rate > 0.2 else rate / 2, round(rate + 0.2, 3))
