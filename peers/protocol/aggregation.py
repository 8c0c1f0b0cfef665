"""The aggregation rules, by which members' pseudo-gradients are combined. A run's rule is in its manifest.

mean           weighted by trained tokens; a single member can move the average anywhere
clip           weights capped at twice the median member's tokens (--hv.max-weight), outliers scaled down to 4 times
               the median norm: one member counts as much as eight median ones at most, enough to dominate small
               groups; a minority that always pulls in one direction has an effect in proportion to its weight
trimmed-mean   for every value, the most extreme members at either end are left out (arXiv 1803.01498)
centered-clip  for every chunk, members are clipped to the median distance from a robust centre
               (arXiv 2012.10333; on shares of the vector as in BTARD, arXiv 2106.11257)

The last two tolerate a minority of Byzantine members, at the cost of some statistical efficiency and of memory: the
owner of a share holds every member's values of it. Their proofs need equal weights and at least three members.
"""

from __future__ import annotations

from typing import Literal, get_args

Rule = Literal["mean", "clip", "trimmed-mean", "centered-clip"]
RULES: tuple[Rule, ...] = get_args(Rule)
ROBUST_RULES = frozenset({"trimmed-mean", "centered-clip"})
LEAST_ROBUST_GROUP = 3
DEFAULT_TRIM = 0.2
"""The share of the members that trimmed-mean leaves out at either end."""


def num_trimmed(trim: float, num_members: int) -> int:
    """How many members trimmed-mean leaves out at either end: at least one, and never all.

    With at most this many Byzantine members, every value of the mean lies within the range of the honest members'.
    """
    return min(max(1, int(trim * num_members)), (num_members - 1) // 2)


def holds_all(rule: str, num_members: int) -> bool:
    """Whether the owner of a share has to hold all members' values at once."""
    return rule in ROBUST_RULES and num_members >= LEAST_ROBUST_GROUP
