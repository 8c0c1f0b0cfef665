"""Finds the checkpoint that --ckpt.resume means, proposing candidates until one proves to be complete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from diloco.checkpoint.choice import Candidate, newest_first, of_others, to_resume
from diloco.checkpoint.dirs import own_part
from diloco.checkpoint.mark import COMPLETE, PEER_PART, Damaged, Mark
from diloco.checkpoint.opened import open_store
from diloco.checkpoint.store import Store
from diloco.errors import UserError

log = logging.getLogger(__name__)


class Finder:
    """Proposes a peer's own checkpoints, or those of other peers if it has none. All methods may raise OSError."""

    def __init__(
        self,
        resume: str,
        path: str,
        world_rank: int | None,
        scratch: Path,
        *,
        on_skipped: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`resume` is `auto` or the directory or URL of one step; `path` is --ckpt.path. Raises UserError.

        `on_skipped` is called with what is wrong with each checkpoint that is skipped.
        """
        if not resume.strip():
            raise UserError(
                "--ckpt.resume has no value; leave it out, or check the variable that it comes from"
            )
        self._resume, self._world_rank = resume, world_rank
        self._on_skipped = on_skipped
        self._is_auto = resume == "auto"
        self._own = self._part = own_part(world_rank)
        self._name = ""
        if not self._is_auto:
            path, self._name, named_part = split(resume)
            self._part = named_part or self._own
            if world_rank is None and named_part:
                raise UserError(
                    f"--ckpt.resume {resume} is the checkpoint of a swarm's peer, which can be resumed only in a "
                    "swarm; one peer is enough: `diloco run --peers 1`"
                )
        self.store: Store = open_store(path, scratch)
        self._refused: dict[tuple[str, str], str] = {}

    def next(self) -> Candidate | None:
        """The next candidate, or None if there is none. Raises UserError if a named one is missing or damaged."""
        return self._newest() if self._is_auto else self._named()

    def refuse(self, candidate: Candidate, problem: str) -> None:
        """Exclude a damaged candidate. Raises Damaged if the user named it, since no other one may replace it."""
        if not self._is_auto:
            raise Damaged(f"{problem}; resume from another checkpoint, or with --ckpt.resume auto")
        self._skip(candidate.name, candidate.part, problem)

    def _named(self) -> Candidate:
        if (raw := self.store.mark(self._name, self._part)) is not None:
            return self._candidate(self._name, self._part, raw)
        takes_others = self._world_rank is not None and self._part == self._own
        others = self.store.parts(self._name) if takes_others else {}
        if not others:
            where, hint = self.store.name_of(self._name, self._part), ""
            if not self._name.startswith("model_step_"):
                hint = (
                    f"; name one of its model_step_<N>, or give --ckpt.path {self._resume} --ckpt.resume auto"
                )
            raise UserError(f"--ckpt.resume {self._resume}: there is no complete checkpoint in {where}{hint}")
        part = min(others, key=_in_order)
        return self._candidate(self._name, part, others[part])

    def _newest(self) -> Candidate | None:
        own = newest_first(list(self._whole_marks(self._part)))
        savers = self.store.savers() if self._world_rank is not None else {}
        if own:
            others = {one.name: self._heads(one.name) for one in own[:3]} if len(savers) > 1 else {}
            return to_resume(own, others, savers, self._world_rank)
        me = self._world_rank
        found = [one for rank in sorted(savers) if rank != me for one in self._whole_marks(own_part(rank))]
        return of_others(found, me, None if me is None else savers.get(me))

    def _whole_marks(self, part: str) -> Iterator[Candidate]:
        for name, raw in self.store.marks(part).items():
            if (name, part) in self._refused:
                continue
            try:
                yield self._candidate(name, part, raw)
            except Damaged as error:
                self._skip(name, part, str(error))

    def _skip(self, name: str, part: str, problem: str) -> None:
        log.warning("%s; skipping %s in favour of an older one", problem, self.store.name_of(name, part))
        self._refused[name, part] = problem
        self._on_skipped(problem)

    def _heads(self, name: str) -> Mapping[int, str]:
        """The heads of the outer states that peers have saved at a step, by world rank."""
        found = {}
        for part, raw in self.store.parts(name).items():
            try:
                found[int(part.removeprefix(PEER_PART))] = Mark.from_bytes(raw).head
            except ValueError:
                # A damaged mark: its peer will not resume from it either.
                continue
        return found

    def _candidate(self, name: str, part: str, raw: bytes) -> Candidate:
        return candidate_of(self.store, name, part, raw, is_own=part == self._own)


def candidates_in(
    store: Store, part: str, on_skipped: Callable[[str], object] = lambda _problem: None
) -> list[Candidate]:
    """A peer's checkpoints whose marks are valid. Raises OSError."""
    found = []
    for name, raw in store.marks(part).items():
        try:
            found.append(Candidate(name=name, part=part, mark=Mark.from_bytes(raw)))
        except ValueError as error:
            # Skipped, not deleted: it may be of use to the user.
            on_skipped(f"the mark of {store.name_of(name, part)} is damaged: {error}")
    return found


def named_in(store: Store, name: str, part: str) -> Candidate:
    """A step's checkpoint: of `part` if given, else without a swarm, else the lowest rank's. Raises UserError."""
    raw = store.mark(name, part)
    if raw is None and not part:
        parts = store.parts(name)
        part = min(parts, key=_in_order, default="")
        raw = parts.get(part)
    if raw is None:
        raise UserError(f"there is no complete checkpoint in {store.name_of(name, part)}")
    return candidate_of(store, name, part, raw)


def candidate_of(store: Store, name: str, part: str, raw: bytes, *, is_own: bool = True) -> Candidate:
    """A Candidate from the content of its complete.json. Raises Damaged."""
    try:
        mark = Mark.from_bytes(raw)
    except ValueError as error:
        where = store.name_of(name, part)
        raise Damaged(f"{where}/{COMPLETE} does not describe a checkpoint: {error}") from error
    return Candidate(name=name, part=part, mark=mark, is_own=is_own)


def split(resume: str) -> tuple[str, str, str]:
    """Split a path or URL of a checkpoint into --ckpt.path, the step's name, and the peer's part or ""."""
    place, slash, name = resume.rstrip("/").rpartition("/")
    part = ""
    if name.startswith(PEER_PART):
        part = name
        place, slash, name = place.rpartition("/")
    return (place or ("/" if slash else ".")), name, part


def _in_order(part: str) -> tuple[int, str]:
    """A sort key that orders parts by world rank."""
    return len(part), part
