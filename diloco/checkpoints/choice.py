"""Which checkpoint to go on from, and which to delete: pure decisions on marks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.checkpoints.mark import Mark

_RECENT = 3
"""Peers that save side by side are so many checkpoints apart at most: each has one under way, and waits for it."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint by its mark; what else is in it has not been looked at."""

    name: str
    """Of the step's directory."""
    part: str
    mark: Mark
    is_own: bool = True
    """Else another peer saved it: its outer state is everybody's, its weights and position are not."""


def newest_first(candidates: Collection[Candidate]) -> list[Candidate]:
    """By when they were saved: after an older one was resumed, higher steps are of a life that was given up."""
    return sorted(candidates, key=lambda one: one.mark.saved_at_ms, reverse=True)


def to_resume(
    own: Sequence[Candidate], others: Mapping[str, Mapping[int, str]], savers: Collection[int], me: int | None
) -> Candidate | None:
    """The newest of a peer's own that the peers it shares its last commit with have too, if they save here too.

    Where all of them were killed at once some had saved a step that others had not; only from one that all have do
    they all go on as if nothing had been. That is the beginning while the very first is being saved. Else, where there
    is no such step, each takes its newest. `own` is newest first; `others` are lineages by step's name and world rank.
    """
    for candidate in own[:_RECENT]:
        mark = candidate.mark
        together = set(mark.contributors or savers).intersection(savers) - {me}
        lineages = others.get(candidate.name, {})
        if all(lineages.get(rank) == mark.lineage for rank in together):
            return candidate
    return own[0] if own and own[0].mark.number else None


def of_others(candidates: Collection[Candidate], me: int | None) -> Candidate | None:
    """Of other peers' checkpoints the one that has come furthest, for a peer that has none.

    Not their very first, where this one took part in what it holds: they begin anew, too (see to_resume).
    """
    best = max(candidates, key=lambda one: (one.mark.position.epoch, one.mark.saved_at_ms), default=None)
    return None if best and not best.mark.number and me in best.mark.contributors else best


def to_delete(
    kept: Collection[Candidate], *, topk: int | None, keep: Literal["last", "best"]
) -> list[Candidate]:
    """What --ckpt.topk and --ckpt.keep leave no room for.

    Among the best the newest always stays, to go on from; those that no evaluation has scored come after the others.
    """
    ranked = newest_first(kept)
    if topk is None or not ranked:
        return []
    newest = ranked[0]
    if keep == "best":
        ranked.sort(key=_loss_of)
    return [one for one in ranked[topk:] if one is not newest]


def _loss_of(candidate: Candidate) -> float:
    loss = candidate.mark.loss
    return math.inf if loss is None or math.isnan(loss) else loss
