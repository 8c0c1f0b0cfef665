"""Which checkpoint to go on from, and which to delete: pure decisions on marks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.checkpoint.mark import Mark

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


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Of a peer that is going to save at a place, or whose checkpoints lie there."""

    at_ms: int = 0
    """Unix time of the first one."""
    has_saved: bool = True
    """Whether a checkpoint of its has ever been whole there."""

    def was_saving_its_first(self, mark: Mark) -> bool:
        """Whether the peer was there when this checkpoint was made, and never got one done itself."""
        return not self.has_saved and self.at_ms <= mark.saved_at_ms


def to_resume(
    own: Sequence[Candidate],
    others: Mapping[str, Mapping[int, str]],
    savers: Mapping[int, Registration],
    me: int | None,
) -> Candidate | None:
    """The newest of a peer's own that the peers it shares its last commit with have too, if they save here too.

    Where all of them were killed at once some had saved a step that others had not; only from one that all have do
    they all go on as if nothing had been. That is the beginning while the others were saving their very first. Else,
    where there is no such step, each takes its newest. `own` is newest first; `others` are heads by step's name and
    world rank.
    """
    recent = {rank for candidate in own[:_RECENT] for rank in others.get(candidate.name, {})}
    for candidate in own[:_RECENT]:
        if not _without(candidate, recent, others, savers, me):
            return candidate
    if not own:
        return None
    newest = own[0]
    without = _without(newest, recent, others, savers, me)
    is_first = not newest.mark.number and all(
        savers[rank].was_saving_its_first(newest.mark) for rank in without
    )
    return None if is_first else newest


def _without(
    candidate: Candidate,
    recent: Collection[int],
    others: Mapping[str, Mapping[int, str]],
    savers: Mapping[int, Registration],
    me: int | None,
) -> set[int]:
    """World ranks that were in it together with this peer, save here, and do not have it."""
    mark, heads = candidate.mark, others.get(candidate.name, {})
    first = {rank for rank, registration in savers.items() if registration.was_saving_its_first(mark)}
    together = set(mark.contributors or {*recent, *first}).intersection(savers) - {me}
    return {rank for rank in together if heads.get(rank) != mark.head}


def of_others(
    candidates: Collection[Candidate], me: int | None, registration: Registration | None
) -> Candidate | None:
    """Of other peers' checkpoints the one that has come furthest, for a peer that has none; of each its newest.

    Not their very first, where this one, so registered, was saving its own: they begin anew, too (see to_resume).
    """
    newest: dict[str, Candidate] = {}
    for one in newest_first(candidates):
        newest.setdefault(one.part, one)
    best = max(newest.values(), key=lambda one: (one.mark.position.epoch, one.mark.saved_at_ms), default=None)
    if best is None or best.mark.number or registration is None:
        return best
    is_in_it = me in best.mark.contributors if best.mark.contributors else True
    return None if is_in_it and registration.was_saving_its_first(best.mark) else best


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
