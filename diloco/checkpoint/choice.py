"""Chooses which checkpoint to resume and which to delete: pure functions of the marks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diloco.checkpoint.mark import PEER_PART, Mark

_RECENT = 3
"""The newest steps to choose from. Peers of one swarm are at most this many checkpoints apart, because each has one
save in progress at most."""


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


@dataclass(frozen=True)
class _Save:
    """The checkpoints of one step with the same outer state, by part, newest first; at least one."""

    name: str
    by_part: Mapping[str, Candidate]

    @property
    def mark(self) -> Mark:
        return next(iter(self.by_part.values())).mark

    @property
    def ranks(self) -> set[int]:
        """The world ranks that have saved this, or contributed to the last commit in it."""
        return _ranks(self.by_part) | set(self.mark.contributors)

    def is_apart_from(self, other: _Save) -> bool:
        """Whether the two are of different runs, or of the two sides of a fork: consecutive commits share peers."""
        return self.mark.head != other.mark.head and self.ranks.isdisjoint(other.ranks)


def to_resume(
    found: Collection[Candidate],
    savers: Mapping[int, Registration],
    part: str,
    *,
    refused: Collection[tuple[str, str]] = (),
    keeps_own: bool = False,
) -> Candidate | None:
    """The checkpoint from which the peer that saves as `part` resumes, of all that are in this place.

    First chooses the step, which is the same for all peers that see this place: the newest that all peers in its last
    commit have, of those that save here. If all peers were killed at once, some may have saved a step that others had
    not; only from a step that all have can the swarm resume without loss. If there is none among the newest, the newest
    is taken, unless the others never completed their first checkpoint: then the beginning is the step that all have,
    and None is returned. What a peer has saved that was cut off from the others, or began a run of its own beside
    theirs, does not count, even if it was saved last.

    Then chooses the peer's own checkpoint of that step, or of that outer state, else another peer's. World ranks are
    assigned anew, so what is saved as `part` may be another peer's from long ago: that it is there does not count. With
    `keeps_own` it does, where the run is alive and only the peer's own state is needed. `refused` are the parts and
    names of checkpoints whose files are damaged.
    """
    saves = _saves(found, refused)
    if keeps_own:
        saves = [save for save in saves if part in save.by_part and (part, save.name) not in refused] or saves
    if not saves:
        return None
    saves = _of_most_peers(saves, savers)
    names = list(dict.fromkeys(save.name for save in saves))[:_RECENT]
    recent = [save for save in saves if save.name in names]
    ranks = {rank for save in recent for rank in _ranks(save.by_part)}
    chosen = next((save for save in recent if not _ranks_without(save, ranks, savers)), None)
    if chosen is None:
        chosen = recent[0]
        missing = [savers[rank] for rank in _ranks_without(chosen, ranks, savers)]
        is_first = all(one.was_saving_its_first(chosen.mark) for one in missing)
        if is_first and not any(one.mark.number for one in found):
            return None
    # Peers of unequal speed save the same outer state at different steps.
    head = chosen.mark.head
    for save in (chosen, *(save for save in saves if head and save.mark.head == head)):
        if part in save.by_part and (part, save.name) not in refused:
            return save.by_part[part]
    usable = [one for one in chosen.by_part if (one, chosen.name) not in refused]
    return chosen.by_part[min(usable, key=in_order)]


def to_delete(kept: Collection[Candidate], *, topk: int | None) -> list[Candidate]:
    """The checkpoints that --ckpt.topk says to delete."""
    return [] if topk is None else newest_first(kept)[topk:]


def in_order(part: str) -> tuple[int, str]:
    """A sort key that orders parts by world rank."""
    return len(part), part


def _saves(found: Collection[Candidate], refused: Collection[tuple[str, str]]) -> list[_Save]:
    """What has been saved, the last first, without that of which all checkpoints are refused."""
    groups: dict[tuple[str, str], dict[str, Candidate]] = {}
    for one in newest_first(found):
        groups.setdefault((one.name, one.mark.head), {})[one.part] = one
    return [
        _Save(name, parts)
        for (name, _), parts in groups.items()
        if any((part, name) not in refused for part in parts)
    ]


def _of_most_peers(saves: Sequence[_Save], savers: Mapping[int, Registration]) -> list[_Save]:
    """These saves, the last first, without those of runs, or sides of a fork, that others outnumber.

    The number of peers in the last commit counts; among equals, what was saved last. Peers that are gone may have been
    more: only what was saved while the peer that saved last was there outnumbers others, or is outnumbered.
    """
    last = saves[0]
    part = next(iter(last.by_part))
    times = [save.by_part[part].mark.saved_at_ms for save in saves if part in save.by_part][:_RECENT]
    # A registration may be an earlier peer's, since world ranks are given again.
    came_at_ms = min((savers[rank].at_ms for rank in _ranks([part]) if rank in savers), default=0)
    # If only its newest one is kept, the ones before it were saved at the pace of all that it has saved.
    mark = last.by_part[part].mark
    usual_ms = max(0, mark.saved_at_ms - came_at_ms) // (mark.number + 1)
    since_ms = min(times[1:], default=max(came_at_ms, mark.saved_at_ms - _RECENT * usual_ms))
    rivals = [save for save in saves if save.mark.saved_at_ms >= since_ms and save.is_apart_from(last)]
    largest = max((last, *rivals), key=lambda save: len(save.ranks))
    return [save for save in saves if save.mark.saved_at_ms < since_ms or not save.is_apart_from(largest)]


def _ranks_without(save: _Save, recent: Collection[int], savers: Mapping[int, Registration]) -> set[int]:
    """World ranks that contributed to the last commit in this and save here, but have not saved this.

    If the contributors are not known, they are the ranks that have saved one of the newest steps (`recent`), and those
    that were saving their first.
    """
    first = {rank for rank, registration in savers.items() if registration.was_saving_its_first(save.mark)}
    together = set(save.mark.contributors or {*recent, *first})
    return together.intersection(savers) - _ranks(save.by_part)


def _ranks(parts: Collection[str]) -> set[int]:
    words = (part.removeprefix(PEER_PART) for part in parts)
    return {int(word) for word in words if word.isdecimal()}
