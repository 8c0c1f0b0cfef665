"""Who owns how much of the reduction, by what each member's link carries.

With N members, a vector of D bytes and shares s_i that sum to 1, member i sends D (1 - s_i) of contributions and
D s_i (N - 1) of results, and receives as much: D (1 + s_i (N - 2)) each way. On a link of b_i bytes/s that takes
t_i = D (1 + s_i (N - 2)) / b_i, and the round takes max t_i. No share takes member i below D / b_i. So the optimum is

    T* = max(max_i D / b_i, T_w),   where the water level T_w is the T with   sum_i max(0, T b_i / D - 1) / (N - 2) = 1

and it is reached by s_i = max(0, T_w b_i / D - 1) / (N - 2): every member that owns anything is done at T_w, and who
needs longer for its own contributions and results alone owns nothing. With two members every share costs the same.

Every member computes the bounds for itself, so they are made of single IEEE operations: the same everywhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from peers.protocol.certificates import Plan
from peers.protocol.rules import Rule
from peers.reduce.plan import ATTEMPT_BYTES, ReducePlan, equal_bounds

MAX_ADVANTAGE = 3.0
"""No member owns more than so many equal shares. What links carry is the members' own word; with this, one that boasts
at most doubles the time of a round: 1 + 3/N (N - 2) against 1 + 1/N (N - 2). It matters to honest members only where
one link carries several times what the others do."""

ALIGNMENT = 4096
"""Bounds are multiples of this, so that no codec's block is cut, unless the vector is too short for it to be fair."""
_MIN_BLOCKS = 256
_MAX_RATIO = 64.0
# Measurements scatter. Within one step of 2 ** 0.25 they count as equal, and the bounds stay where they were: what
# error feedback holds of a share is lost where the share moves on.
_STEP, _HALF_STEP = 1.189207115002721, 1.0905077326652577
_NUM_HALVINGS = 100


def reduce_plan_of(plan: Plan, me: str, numel: int, codec: str, rule: Rule, trim: float) -> ReducePlan:
    """How the members of a plan reduce: the same on all of them. Raises ProtocolError for a group that cannot."""
    contributors = plan.contributors
    return ReducePlan(
        attempt=bytes.fromhex(plan.digest)[:ATTEMPT_BYTES],
        members=tuple(contributor.world_rank for contributor in contributors),
        me=[contributor.peer_id for contributor in contributors].index(me),
        weights=tuple(contributor.weight for contributor in contributors),
        norms=tuple(contributor.work.norm for contributor in contributors),
        bounds=bounds_of([contributor.work.bandwidth for contributor in contributors], numel),
        codec=codec,
        rule=rule,
        trim=trim,
    )


def bounds_of(bandwidths: Sequence[float], numel: int) -> tuple[int, ...]:
    """The bounds for members, in order, whose links carry so many bytes/s: 0 or not finite where that is not known.

    Who is not known is taken for the median of those that are; what is known, for at most 64 times more or less than
    that median. Shares may be empty.
    """
    count = len(bandwidths)
    known = [b for b in bandwidths if math.isfinite(b) and b > 0]
    if not known or count < 3:
        return equal_bounds(numel, count)
    median = statistics.median(known)
    speeds = [_stepped(b / median) if math.isfinite(b) and b > 0 else 1.0 for b in bandwidths]
    block = ALIGNMENT if numel >= _MIN_BLOCKS * ALIGNMENT else 1
    bounds, total = [0], 0.0
    for share in shares_of(speeds)[:-1]:
        total += share
        bounds.append(min(round(total * numel / block) * block, numel))
    return (*bounds, numel)


def shares_of(speeds: Sequence[float]) -> list[float]:
    """The shares by the water level, none above `MAX_ADVANTAGE` equal ones; for three members or more."""
    spread = len(speeds) - 2
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
    """The nearest power of the step."""
    ratio, level = min(max(ratio, 1 / _MAX_RATIO), _MAX_RATIO), 1.0
    while ratio > level * _HALF_STEP:
        level *= _STEP
    while ratio * _HALF_STEP < level:
        level /= _STEP
    return level
