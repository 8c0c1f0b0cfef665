"""How members' pseudo-gradients become one, and what a member may weigh in it.

mean           weighted by trained tokens; anybody can do anything to it
clip           weights capped, outliers scaled down to a multiple of the group's median norm: nobody drowns the others,
               but a minority that pulls one way (flipped signs, say) is followed as far as its weights go
trimmed-mean   weights capped; for every value, the members that are farthest out on either side are left out
               (Yin et al., arXiv 1803.01498)
centered-clip  weights capped; for every chunk, members are pulled to within the median distance of a robust centre
               (Karimireddy et al., arXiv 2012.10333; on shares of the vector as in BTARD, arXiv 2106.11257)

The last two stand up to a minority of any mind, at the price of some statistical efficiency, and of memory: the owner
of a share holds every member's values of it. In groups of less than three no member can be told to be the odd one, so
all are the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from peers.errors import UserError
from peers.round.messages import Proposal

Rule = Literal["mean", "clip", "trimmed-mean", "centered-clip"]
RULES: tuple[Rule, ...] = get_args(Rule)
HOLDING_RULES = frozenset({"trimmed-mean", "centered-clip"})
"""Those that need all members' values at once."""

CLIP_FACTOR = 4.0
"""A pseudo-gradient longer than this many times the group's median is scaled down to it."""
DEFAULT_MAX_WEIGHT = 4.0


@dataclass(frozen=True)
class Aggregation:
    """The same on all members of a run."""

    rule: Rule = "clip"
    max_weight: float = DEFAULT_MAX_WEIGHT
    """A member counts for this many times the group's median of trained tokens at most."""
    audit: float = 0.0
    """The probability with which an owner's sums are reduced again by everybody (peers/round/audit.py), each round."""

    @classmethod
    def of(cls, manifest: Mapping[str, str | int | float | bool | None]) -> Aggregation:
        """What a checked manifest says. Raises UserError where its values do not go together."""
        if manifest.get("hv.audit") and manifest.get("hv.compression") == "topk":
            raise UserError(
                "--hv.audit cannot tell false sums under --hv.compression topk, which carries most of a sum over to "
                "later rounds; int8 and int4 can be audited"
            )
        rule, most = manifest.get("hv.aggregation"), manifest.get("hv.max_weight")
        named = next((known for known in RULES if known == rule), cls.rule)
        return cls(named, float(most) if most else cls.max_weight, float(manifest.get("hv.audit") or 0.0))

    def weights_of(self, members: Sequence[Proposal]) -> tuple[float, ...]:
        """Each member's share of the trained tokens, times a scale that clips outliers under `clip`.

        A pure function of the proposals, so that members can tell whether the leader has followed it.
        """
        tokens = [float(member.tokens) for member in members]
        if len(members) < 3 or self.rule == "mean":
            return _shares(tokens)
        most = self.max_weight * statistics.median(tokens)
        shares = _shares([min(count, most) for count in tokens] if most > 0 else tokens)
        if self.rule != "clip":
            return shares
        longest = CLIP_FACTOR * statistics.median(member.norm for member in members)
        return tuple(
            share * min(1.0, longest / member.norm) if member.norm > 0 else share
            for share, member in zip(shares, members, strict=True)
        )


def holds_all(rule: str, num_members: int) -> bool:
    """Whether the owner of a share has to hold the values of every member."""
    return rule in HOLDING_RULES and num_members >= 3


def _shares(tokens: Sequence[float]) -> tuple[float, ...]:
    total = sum(tokens)
    return tuple(count / total if total else 1 / len(tokens) for count in tokens)
