"""The rules by which members' pseudo-gradients become one; which one a run has is in its manifest.

mean           weighted by trained tokens; anybody can do anything to it
clip           weights capped, outliers scaled down to 4 times the group's median norm: among six peers or more nobody
               drowns the others, among fewer one that pulls without end outweighs them; and a minority that pulls one
               way (flipped signs, say) is followed as far as its weights go
trimmed-mean   for every value, the members that are farthest out on either side are left out (arXiv 1803.01498)
centered-clip  for every chunk, members are pulled to within the median distance of a robust centre
               (arXiv 2012.10333; on shares of the vector as in BTARD, arXiv 2106.11257)

The last two stand up to a minority of any mind, at the price of some statistical efficiency, and of memory: the owner
of a share holds every member's values of it. Their proofs weigh all members alike, and need at least three of them.
"""

from __future__ import annotations

from typing import Literal, get_args

Rule = Literal["mean", "clip", "trimmed-mean", "centered-clip"]
RULES: tuple[Rule, ...] = get_args(Rule)
ROBUST_RULES = frozenset({"trimmed-mean", "centered-clip"})
LEAST_ROBUST_GROUP = 3
DEFAULT_TRIM = 0.2
"""Of the members, what trimmed-mean leaves out on either side."""


def num_trimmed(trim: float, num_members: int) -> int:
    """How many trimmed-mean leaves out on either side: one at least, and never all.

    So many liars, wherever they pull to, leave every value of the mean within those of the honest members.
    """
    return min(max(1, int(trim * num_members)), (num_members - 1) // 2)


def holds_all(rule: str, num_members: int) -> bool:
    """Whether the owner of a share has to hold the values of every member."""
    return rule in ROBUST_RULES and num_members >= LEAST_ROBUST_GROUP
