"""Chooses which checkpoint to resume and which to delete: pure functions of the marks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diloco.checkpoint.mark import Mark

_RECENT = 3
"""The newest checkpoints to compare with other peers'. Peers of one swarm are at most this many checkpoints apart,
because each has one save in progress at most."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint whose mark has been read and whose other files have not."""

    name: str
    """The step's directory, `model_step_<N>`."""
    part: str
    """The peer's directory in it, `diloco_rank_<r>`; empty without a swarm."""
    mark: Mark


def newest_first(candidates: Collection[Candidate]) -> list[Candidate]:
    """Sorted by the time of saving, not by step: after an older checkpoint was resumed, higher steps are obsolete."""
    return sorted(candidates, key=lambda one: one.mark.saved_at_ms, reverse=True)


@dataclass(frozen=True, kw_only=True)
class Registration:
    """The record that a peer saves its checkpoints at a place, written when the peer starts."""

    at_ms: int = 0
    """Unix time of the first registration."""
    has_saved: bool = True
    """Whether the peer has ever completed a checkpoint there."""

    def was_saving_its_first(self, mark: Mark) -> bool:
        """Whether the peer was registered when this checkpoint was made, but never completed one of its own."""
        return not self.has_saved and self.at_ms <= mark.saved_at_ms


def to_resume(
    own: Sequence[Candidate],
    others: Mapping[str, Mapping[int, str]],
    savers: Mapping[int, Registration],
    me: int | None,
) -> Candidate | None:
    """The peer's newest checkpoint that all peers in its last commit have too, of those that save at this place.

    If all peers were killed at once, some may have saved a step that others had not; only from a step that all have can
    the swarm resume without loss. If the others never completed their first checkpoint, that step is the beginning, and
    None is returned. If there is no common step for other reasons, each peer takes its newest. `own` is newest first;
    `others` maps step names and world ranks to heads.
    """
    recent = {rank for candidate in own[:_RECENT] for rank in others.get(candidate.name, {})}
    for candidate in own[:_RECENT]:
        if not _ranks_without(candidate, recent, others, savers, me):
            return candidate
    if not own:
        return None
    newest = own[0]
    without = _ranks_without(newest, recent, others, savers, me)
    is_first = not newest.mark.number and all(
        savers[rank].was_saving_its_first(newest.mark) for rank in without
    )
    return None if is_first else newest


def _ranks_without(
    candidate: Candidate,
    recent: Collection[int],
    others: Mapping[str, Mapping[int, str]],
    savers: Mapping[int, Registration],
    me: int | None,
) -> set[int]:
    """World ranks that contributed to the checkpoint's last commit and save here, but do not have this checkpoint."""
    mark, heads = candidate.mark, others.get(candidate.name, {})
    first = {rank for rank, registration in savers.items() if registration.was_saving_its_first(mark)}
    together = set(mark.contributors or {*recent, *first}).intersection(savers) - {me}
    return {rank for rank in together if heads.get(rank) != mark.head}


def of_others(
    candidates: Collection[Candidate], me: int | None, registration: Registration | None
) -> Candidate | None:
    """For a peer without checkpoints: among the newest ones of the other peers, the one with the highest epoch.

    Skips another peer's first checkpoint if this peer's first was still being written: that peer starts from the
    beginning as well (see to_resume).
    """
    newest: dict[str, Candidate] = {}
    for one in newest_first(candidates):
        newest.setdefault(one.part, one)
    best = max(newest.values(), key=lambda one: (one.mark.position.epoch, one.mark.saved_at_ms), default=None)
    if best is None or best.mark.number or registration is None:
        return best
    is_in_it = me in best.mark.contributors if best.mark.contributors else True
    return None if is_in_it and registration.was_saving_its_first(best.mark) else best


def to_delete(kept: Collection[Candidate], *, topk: int | None) -> list[Candidate]:
    """The checkpoints that --ckpt.topk says to delete."""
    return [] if topk is None else newest_first(kept)[topk:]
