"""How large a share each member owns, by the bandwidth of its link.

With N members, a vector of D bytes and shares s_i that sum to 1, member i sends D (1 - s_i) of contributions and
D s_i (N - 1) of results, and receives as much: D (1 + s_i (N - 2)) each way. On a link of b_i bytes/s that takes
t_i = D (1 + s_i (N - 2)) / b_i, and the round takes max t_i. No share takes member i below D / b_i. So the optimum is

    T* = max(max_i D / b_i, T_w),   where the water level T_w is the T with   sum_i max(0, T b_i / D - 1) / (N - 2) = 1

and it is reached by s_i = max(0, T_w b_i / D - 1) / (N - 2): every member that owns anything finishes at T_w, and a
member that needs longer for its own contributions and results alone owns nothing. With two members every division into
shares costs the same.

In a grid (grid.py) of C columns, a member of a column of R, whose piece is p, owns p / R and sends D (1 + p spread),
spread = C - 1 + (R - 2) / R: it collects and passes on the whole piece. So the pieces have their sizes by the same
formula, with the slowest member of each column for b_i, and members of like bandwidth share a column.

Every member computes the bounds for itself, so they use single IEEE operations, which give the same bits everywhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from peers.protocol.aggregation import Rule, holds_all
from peers.protocol.certificates import Contributor, Plan
from peers.reduce.grid import Grid, best_grid
from peers.reduce.plan import ATTEMPT_BYTES, ReducePlan, equal_bounds

GRID_FROM = 16
"""Contributors: with fewer, all exchange with all."""

MAX_ADVANTAGE = 3.0
"""No member owns more than this many equal shares, and no column of a grid so many equal pieces. Bandwidths are the
members' own claims; with this bound, one that overstates its bandwidth at most doubles the time of a round:
1 + 3/N (N - 2) against 1 + 1/N (N - 2). Honest members are affected only if one link is several times as fast as the
others."""

ALIGNMENT = 4096
"""Bounds are multiples of this, so that they cut no codec's block, unless the vector is too short to divide fairly."""
_MIN_BLOCKS = 256
_MAX_RATIO = 64.0
# Bandwidths are rounded to powers of 2 ** 0.25, so that bounds stay in place although measurements scatter: where a
# share moves, the residuals of its old owner are lost.
_STEP, _HALF_STEP = 1.189207115002721, 1.0905077326652577
_SQRT_2 = 1.4142135623730951
_NUM_HALVINGS = 100


def stands_in_grid(num_contributors: int, rule: Rule) -> bool:
    return num_contributors >= GRID_FROM and not holds_all(rule, num_contributors)


class Arrangement(NamedTuple):
    """Where the contributors of a plan stand, and what each owns: the same on all of them."""

    contributors: tuple[Contributor, ...]
    num_columns: int
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan, numel: int, rule: Rule) -> Self:
        contributors, count = plan.contributors, len(plan.contributors)
        bandwidths = [contributor.work.bandwidth for contributor in contributors]
        if not stands_in_grid(count, rule):
            return cls(contributors, count, bounds_of(bandwidths, numel))
        speeds = _speeds(bandwidths)
        order, grid = _order_in_grid(speeds), best_grid(count)
        bounds = _bounds_in_grid([speeds[member] for member in order], grid, numel)
        return cls(tuple(contributors[member] for member in order), len(grid.columns), bounds)


def likely_neighbours(me: str, bandwidths: Mapping[str, float], rule: Rule) -> set[str]:
    """The peers with which this one will exchange values if these contribute, by peer id in order of world rank."""
    peer_ids, count = list(bandwidths), len(bandwidths)
    if not stands_in_grid(count, rule):
        return bandwidths.keys() - {me}
    order = _order_in_grid(_speeds(list(bandwidths.values())))
    neighbours = best_grid(count).neighbours(order.index(peer_ids.index(me)))
    return {peer_ids[order[member]] for member in neighbours}


def reduce_plan_of(plan: Plan, me: str, numel: int, codec: str, rule: Rule, trim: float) -> ReducePlan:
    """The reduction of a plan, the same on all members but for `me`. Raises ProtocolError if two of its members
    have one world rank."""
    arrangement = Arrangement.of(plan, numel, rule)
    contributors = arrangement.contributors
    return ReducePlan(
        attempt=bytes.fromhex(plan.digest)[:ATTEMPT_BYTES],
        members=tuple(contributor.world_rank for contributor in contributors),
        me=[contributor.peer_id for contributor in contributors].index(me),
        weights=tuple(contributor.weight for contributor in contributors),
        norms=tuple(contributor.work.norm for contributor in contributors),
        bounds=arrangement.bounds,
        codec=codec,
        rule=rule,
        trim=trim,
        num_columns=arrangement.num_columns,
    )


def bounds_of(bandwidths: Sequence[float], numel: int) -> tuple[int, ...]:
    """The bounds of shares for members with these bandwidths in bytes/s; 0 or not finite: not known.

    Unknown bandwidths count as the median of the known ones; known ones as at most 64 times more or less than that.
    Shares may be empty.
    """
    if len(bandwidths) < 3 or not any(map(_is_known, bandwidths)):
        return equal_bounds(numel, len(bandwidths))
    return _bounds_by(shares_of(_speeds(bandwidths), spread=len(bandwidths) - 2), numel)


def _order_in_grid(speeds: Sequence[float]) -> list[int]:
    """Members by speed, rounded to powers of two so that places do not change with every measurement."""
    return sorted(range(len(speeds)), key=lambda member: math.frexp(speeds[member] * _SQRT_2)[1])


def _bounds_in_grid(speeds: Sequence[float], grid: Grid, numel: int) -> tuple[int, ...]:
    """The bounds of shares that are equal within a column, for members with these speeds."""
    rows = len(speeds) / len(grid.columns)
    slowest = [min(speeds[member] for member in column) for column in grid.columns]
    pieces = shares_of(slowest, spread=len(grid.columns) - 1 + (rows - 2) / rows)
    shares = [piece / len(column) for piece, column in zip(pieces, grid.columns, strict=True) for _ in column]
    return _bounds_by(shares, numel)


def _speeds(bandwidths: Sequence[float]) -> list[float]:
    """Bandwidths relative to the median of the known ones; all 1 if none is known."""
    known = [b for b in bandwidths if _is_known(b)]
    if not known:
        return [1.0] * len(bandwidths)
    median = statistics.median(known)
    return [_stepped(b / median) if _is_known(b) else 1.0 for b in bandwidths]


def _is_known(bandwidth: float) -> bool:
    return math.isfinite(bandwidth) and bandwidth > 0


def _bounds_by(shares: Iterable[float], numel: int) -> tuple[int, ...]:
    block = ALIGNMENT if numel >= _MIN_BLOCKS * ALIGNMENT else 1
    bounds, total = [0], 0.0
    for share in shares:
        total += share
        bounds.append(min(round(total * numel / block) * block, numel))
    return (*bounds[:-1], numel)


def shares_of(speeds: Sequence[float], spread: float) -> list[float]:
    """The shares by the water level, none above `MAX_ADVANTAGE` equal shares; `spread` above 0."""
    most = min(1.0, MAX_ADVANTAGE / len(speeds))

    def at(level: float) -> list[float]:
        return [min(most, max(0.0, level * speed - 1.0) / spread) for speed in speeds]

    low, high = 0.0, (1.0 + most * spread) / min(speeds)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        if math.fsum(at(middle)) < 1.0:
            low = middle
        else:
            high = middle
    shares = at(high)
    total = math.fsum(shares)
    return [share / total for share in shares]


def _stepped(ratio: float) -> float:
    """The nearest power of `_STEP`."""
    ratio, level = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO), 1.0
    while ratio > level * _HALF_STEP:
        level *= _STEP
    while ratio * _HALF_STEP < level:
        level /= _STEP
    return level
