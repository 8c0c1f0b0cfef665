"""The weight of each contribution. Pure functions: every member recomputes the weights that the leader proposes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peers.protocol.aggregation import DEFAULT_TRIM, LEAST_ROBUST_GROUP, ROBUST_RULES, RULES, Rule
from peers.protocol.certificates import Plan, Work

CLIP_FACTOR = 4.0
"""A pseudo-gradient longer than this many times the group's median norm is scaled down to it."""
DEFAULT_MAX_WEIGHT = 2.0


@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """How pseudo-gradients are averaged; the same on all peers of a run.

    mean: weighted by the tokens that peers claim. clip: as mean, with claims bounded by the manifest and by a multiple
    of the median, and long pseudo-gradients scaled down. trimmed-mean (arXiv 1803.01498) and centered-clip
    (2012.10333): equal weights.
    """

    rule: Rule = "clip"
    max_weight: float = DEFAULT_MAX_WEIGHT
    """Under clip, a member counts for at most this many times the median of the group's tokens."""
    max_tokens_per_epoch: int = 0
    """The tokens that one peer can train in one epoch by the manifest; 0: the manifest does not say."""
    trim: float = DEFAULT_TRIM
    """Under trimmed-mean, the share of the members that is dropped at either end."""
    staleness_discount: float = 1.0
    """A contribution's weight is multiplied by this for each commit that it missed (cf. arXiv 2401.09135)."""

    @classmethod
    def of(cls, manifest: Mapping[str, str | int | float | bool | None]) -> Aggregation:
        """The aggregation of a checked manifest."""
        rule, most = manifest.get("hv.aggregation"), manifest.get("hv.max_weight")
        samples, length = manifest.get("total_batch_size"), manifest.get("seq_length")
        steps, fragments = manifest.get("hv.local_steps"), manifest.get("hv.num_fragments")
        tokens = int(samples or 0) * int(length or 0) * int(steps or 0) // int(fragments or 1)
        # The manifest of --mode grpo does not say how long completions are.
        tokens = tokens if manifest.get("mode") == "pretrain" else 0
        return cls(
            rule=next((known for known in RULES if known == rule), cls.rule),
            max_weight=float(most) if most else DEFAULT_MAX_WEIGHT,
            max_tokens_per_epoch=tokens,
            trim=float(manifest.get("hv.trim") or DEFAULT_TRIM),
            staleness_discount=float(manifest.get("hv.staleness_discount") or 1.0),
        )

    @property
    def least_group(self) -> int:
        return LEAST_ROBUST_GROUP if self.rule in ROBUST_RULES else 1

    def weights_of(
        self,
        works: Sequence[Work],
        epoch: int,
        num_fragments: int,
        *,
        lengths_before: Sequence[float] | None = None,
    ) -> tuple[float, ...]:
        """The weight of each contribution to the commit that ends in `epoch`; they sum to 1 unless some are clipped.

        `lengths_before`: for a group of two out of a larger roster, how long each member's contribution to the commit
        before was (`lengths_in`; 0: it had none). None in a roster of two: neither of its norms is more trustworthy
        than the other, and nothing is scaled down.
        """
        shares = self._shares_of(works, epoch, num_fragments)
        if self.rule != "clip":
            return shares
        longest = CLIP_FACTOR * statistics.median_low([work.norm for work in works])
        limits = [longest] * len(works)
        if len(works) < LEAST_ROBUST_GROUP:
            if lengths_before is None:
                return shares
            # As long as it was before, too: else a member could announce 0, to erase the other's work.
            limits = [max(longest, before) for before in lengths_before]
        return tuple(
            share * min(1.0, limit / work.norm) if work.norm > 0 else share
            for share, limit, work in zip(shares, limits, works, strict=True)
        )

    def lengths_in(self, plan: Plan, num_fragments: int) -> dict[str, float]:
        """By peer id, the length to which each contribution to this commit was scaled."""
        works = [contributor.work for contributor in plan.contributors]
        shares = self._shares_of(works, plan.epoch, num_fragments)
        return {
            contributor.peer_id: contributor.work.norm * (contributor.weight / share) if share else 0.0
            for contributor, share in zip(plan.contributors, shares, strict=True)
        }

    def _shares_of(self, works: Sequence[Work], epoch: int, num_fragments: int) -> tuple[float, ...]:
        """The weights before pseudo-gradients are scaled down; they sum to 1."""
        if self.rule in ROBUST_RULES:
            return tuple(1 / len(works) for _ in works)
        ages = [max(0, epoch - work.based_on - num_fragments) for work in works]
        claims = [
            self._claim(work, epoch) * _power(self.staleness_discount, age)
            for work, age in zip(works, ages, strict=True)
        ]
        if self.rule == "clip" and claims:
            # Of two claims, median_low takes the lower one: with their mean, a peer could raise its own bound.
            most = self.max_weight * statistics.median_low(claims)
            claims = [min(claim, most) for claim in claims] if most > 0 else claims
        return _shares(claims)

    def _claim(self, work: Work, epoch: int) -> float:
        if self.rule == "mean" or not self.max_tokens_per_epoch:
            return float(work.tokens)
        return float(min(work.tokens, self.max_tokens_per_epoch * max(1, epoch - work.based_on)))


def _shares(claims: Sequence[float]) -> tuple[float, ...]:
    # From Python 3.12 on, sum() rounds floats differently from before; fsum rounds once, everywhere.
    total = math.fsum(claims)
    return tuple(claim / total if total else 1 / len(claims) for claim in claims)


def _power(base: float, exponent: int) -> float:
    """`base**exponent` by multiplications alone: pow() differs in its last bit between systems."""
    result = 1.0
    for bit in f"{exponent:b}":
        result *= result * base if bit == "1" else result
    return result
