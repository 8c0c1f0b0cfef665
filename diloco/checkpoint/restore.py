"""Finds the checkpoint that --ckpt.resume means, fetches and verifies it: the same one on all ranks of a peer."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from diloco.checkpoint.choice import Candidate, Registration, in_order, to_delete, to_resume
from diloco.checkpoint.digests import problems_by_ranks, without_outer
from diloco.checkpoint.mark import COMPLETE, PEER_PART, Damaged, Mark, write_mark
from diloco.checkpoint.store import Store, is_refusal, open_store, own_part
from diloco.errors import DilocoError, UserError
from diloco.options.flags import CkptConfig
from diloco.outages import waited_out
from diloco.outer.diloco import Restored
from diloco.outer.world import World, on_every_rank, on_rank_zero

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files have all been verified, except those of an outer state that is not needed."""

    mark: Mark
    directory: Path
    is_own: bool
    """False if another peer saved it: then only its outer state is of use, not its weights and position."""


class OwnCheckpoints:
    """One peer's checkpoints at --ckpt.path: finds the one to resume, completes new ones and deletes old ones.

    `resumed` is a collective; all other methods are for rank 0. The constructor and `resumed` wait for a store that is
    out of reach, for `PATIENCE_S`.
    """

    def __init__(self, config: CkptConfig, scratch: Path) -> None:
        """`scratch` is a local directory for files being uploaded or downloaded. Raises UserError and DilocoError."""
        self.store = waited_out(lambda: open_store(config.path, scratch))
        self.deleting: Candidate | None = None
        """The old checkpoint that is being deleted, if any."""
        self._config, self._scratch = config, scratch
        self._number = self._saved_at_ms = 0
        self._contributors: tuple[int, ...] = ()
        self._registered: int | None = None
        """The world rank that the store records as having a complete checkpoint."""

    def resumed(
        self,
        world: World,
        world_rank: int | None,
        stack: contextlib.ExitStack,
        on_skipped: Callable[[str], None],
        *,
        needs_outer: bool,
        run_is_alive: bool,
    ) -> Found | None:
        """As `fetched`; checkpoints saved afterwards continue the history of the one that was found."""
        if self._config.interval is not None:
            self._saved_at_ms = on_rank_zero(lambda: waited_out(lambda: self._register(world_rank)))
        found = fetched(
            self._config,
            world,
            world_rank,
            self._scratch,
            stack,
            needs_outer=needs_outer,
            run_is_alive=run_is_alive,
            on_skipped=on_skipped,
        )
        if found is not None:
            self._number, self._contributors = found.mark.number + 1, found.mark.contributors
            self._saved_at_ms = max(self._saved_at_ms, found.mark.saved_at_ms)
        return found

    def complete(self, staging: Path, mark: Mark, step: int, world_rank: int | None) -> None:
        """Mark a checkpoint whose files have all been sent, and store the mark. Raises OSError."""
        self._saved_at_ms = max(self._saved_at_ms + 1, time.time_ns() // 1_000_000)
        # Before the first commit after a resume, the contributors are those of the resumed checkpoint.
        self._contributors = mark.contributors or self._contributors
        mark = replace(
            mark, number=self._number, saved_at_ms=self._saved_at_ms, contributors=self._contributors
        )
        write_mark(staging, mark)
        self.store.finish(staging, step, own_part(world_rank))
        self._number += 1
        if world_rank not in (None, self._registered):
            # If this fails, the next save tries again: the checkpoint itself is complete.
            with contextlib.suppress(OSError):
                self.store.register(world_rank, has_saved=True)
                self._registered = world_rank

    def delete_old(self, world_rank: int | None) -> None:
        """Delete this peer's checkpoints in excess of `--ckpt.topk`. A failure is logged."""
        try:
            kept = candidates_in(self.store, own_part(world_rank))
            for old in to_delete(kept, topk=self._config.topk):
                self.deleting = old
                self.store.delete(old.name, old.part)
                self.deleting = None
        except OSError as error:
            log.error("an old checkpoint was not deleted: %s", error)

    def _register(self, world_rank: int | None) -> int:
        """Register this peer at the store and remove its half-written checkpoints.

        Returns when its newest checkpoint there was saved (Unix time in ms; 0 if there is none). Raises UserError if
        the store refuses that, DilocoError if it is out of reach.
        """
        part = own_part(world_rank)
        try:
            self.store.clear(part)
            if world_rank is not None:
                self.store.register(world_rank)
            return max((one.mark.saved_at_ms for one in candidates_in(self.store, part)), default=0)
        except OSError as error:
            if not is_refusal(error):
                raise DilocoError(f"--ckpt.path {self._config.path} cannot be reached: {error}") from error
            raise UserError(
                f"--ckpt.path {self._config.path} cannot be written to: {error.strerror or error}. Name another "
                "place, or leave out --ckpt.interval to save nothing"
            ) from error


def fetched(
    config: CkptConfig,
    world: World,
    world_rank: int | None,
    scratch: Path,
    stack: contextlib.ExitStack,
    *,
    needs_outer: bool = True,
    run_is_alive: bool = False,
    on_skipped: Callable[[str], None] = lambda problem: None,
) -> Found | None:
    """The checkpoint to resume; its directory exists until the stack is closed. A collective. Raises UserError, and
    DilocoError if the store is out of reach for long.

    The result may be another peer's, unless `run_is_alive` and this peer has one. Without `needs_outer` the files of
    the outer state are neither fetched nor verified. `on_skipped` is called on rank 0 with what is wrong with each
    checkpoint that was skipped.
    """
    if config.resume is None:
        return None
    finder = Finder(
        config.resume, config.path, world_rank, scratch, run_is_alive=run_is_alive, on_skipped=on_skipped
    )
    resuming = partial(_resuming, config.resume)

    def reached(operation: Callable[[], T]) -> T:
        return waited_out(resuming()(operation))

    with resuming():
        while (candidate := on_rank_zero(lambda: reached(finder.next))) is not None:
            if not needs_outer:
                candidate = replace(candidate, mark=without_outer(candidate.mark))
            directory = _fetch_to_node(finder.store, candidate, world, stack, reached)
            problems = problems_by_ranks(directory, candidate.mark, world)
            if not problems:
                return Found(candidate.mark, directory, candidate.part == own_part(world_rank))
            stack.close()
            name = finder.store.name_of(candidate.name, candidate.part)
            on_rank_zero(partial(finder.refuse, candidate, problems[0].replace(str(directory), name)))
    return None


@contextlib.contextmanager
def _resuming(resume: str) -> Iterator[None]:
    """Convert OSError to UserError if the store has refused something, else to DilocoError."""
    try:
        yield
    except OSError as error:
        kind = UserError if is_refusal(error) else DilocoError
        raise kind(f"--ckpt.resume {resume}: {error}") from error


def others_state(mark: Mark, directory: Path) -> Restored:
    """Restore only the outer state of another peer's checkpoint: the agreed weights at the start of the epoch."""
    position, tokens = replace(mark.position, local_step=0), (0,) * len(mark.tokens)
    return Restored(
        position=position,
        steps_per_epoch=mark.steps_per_epoch,
        tokens=tokens,
        directory=directory,
        is_own=False,
    )


def refuse_to_begin_anew(config: CkptConfig, step: int, skipped: Sequence[str]) -> None:
    """Raise UserError if training would start at step 0 because all checkpoints were damaged.

    A collective; `skipped` matters on rank 0 only.
    """

    def check() -> None:
        if step == 0 and skipped:
            raise UserError(
                f"no checkpoint in {config.path} can be resumed by this peer: {'; '.join(skipped[:3])}. "
                "Leave out --ckpt.resume to begin anew"
            )

    on_rank_zero(check)


def skipped_event(problem: str) -> dict[str, Any]:
    """The metrics.jsonl event for a damaged checkpoint that was skipped."""
    return {"event": "checkpoint_skipped", "reason": problem}


class Finder:
    """Proposes checkpoints to resume, the peer's own or other peers'. All methods may raise OSError."""

    def __init__(
        self,
        resume: str,
        path: str,
        world_rank: int | None,
        scratch: Path,
        *,
        run_is_alive: bool,
        on_skipped: Callable[[str], None],
    ) -> None:
        """`resume` is `auto` or the directory or URL of one step; `path` is --ckpt.path. Raises UserError.

        If `run_is_alive`, the run's state comes from its peers, and `auto` means the peer's own newest checkpoint if it
        has one. `on_skipped` is called with what is wrong with each checkpoint that is skipped.
        """
        if not resume.strip():
            raise UserError(
                "--ckpt.resume has no value; leave it out, or check the variable that it comes from"
            )
        self._resume, self._world_rank = resume, world_rank
        self._run_is_alive, self._on_skipped = run_is_alive, on_skipped
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
        self.store: Store = waited_out(lambda: open_store(path, scratch))
        self._refused: set[tuple[str, str]] = set()

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
            return candidate_of(self.store, self._name, self._part, raw)
        takes_others = self._world_rank is not None and self._part == self._own
        others = self.store.parts(self._name) if takes_others else {}
        if not others:
            where, hint = self.store.name_of(self._name, self._part), ""
            if not self._name.startswith("model_step_"):
                hint = (
                    f"; name one of its model_step_<N>, or give --ckpt.path {self._resume} --ckpt.resume auto"
                )
            raise UserError(f"--ckpt.resume {self._resume}: there is no complete checkpoint in {where}{hint}")
        part = min(others, key=in_order)
        return candidate_of(self.store, self._name, part, others[part])

    def _newest(self) -> Candidate | None:
        found, savers = self._marks_and_savers
        return to_resume(found, savers, self._part, refused=self._refused, keeps_own=self._run_is_alive)

    @cached_property
    def _marks_and_savers(self) -> tuple[list[Candidate], dict[int, Registration]]:
        if self._world_rank is None:
            return candidates_in(self.store, self._part, self._skip), {}
        return whole(self.store, self.store.all_marks(), self._skip), self.store.savers()

    def _skip(self, name: str, part: str, problem: str) -> None:
        if (part, name) in self._refused:
            return
        log.warning("%s; skipping %s in favour of another one", problem, self.store.name_of(name, part))
        self._refused.add((part, name))
        self._on_skipped(problem)


def candidates_in(
    store: Store,
    part: str,
    on_damaged: Callable[[str, str, str], object] = lambda _name, _part, _problem: None,
) -> list[Candidate]:
    """A peer's checkpoints with valid marks; `on_damaged` is as for `whole`. Raises OSError."""
    return whole(store, {(name, part): raw for name, raw in store.marks(part).items()}, on_damaged)


def whole(
    store: Store, marks: Mapping[tuple[str, str], bytes], on_damaged: Callable[[str, str, str], object]
) -> list[Candidate]:
    """The checkpoints whose marks, by name and part, are valid; `on_damaged` gets name, part and problem of others."""
    found = []
    for (name, part), raw in marks.items():
        try:
            found.append(candidate_of(store, name, part, raw))
        except Damaged as error:
            # Skipped, not deleted: it may be of use to the user.
            on_damaged(name, part, str(error))
    return found


def named_in(store: Store, name: str, part: str) -> Candidate:
    """A step's checkpoint: of `part` if given, else of no swarm, else of the lowest world rank. Raises UserError."""
    raw = store.mark(name, part)
    if raw is None and not part:
        parts = store.parts(name)
        part = min(parts, key=in_order, default="")
        raw = parts.get(part)
    if raw is None:
        raise UserError(f"there is no complete checkpoint in {store.name_of(name, part)}")
    return candidate_of(store, name, part, raw)


def candidate_of(store: Store, name: str, part: str, raw: bytes) -> Candidate:
    """A Candidate from the content of its complete.json. Raises Damaged."""
    try:
        mark = Mark.from_bytes(raw)
    except ValueError as error:
        where = store.name_of(name, part)
        raise Damaged(f"{where}/{COMPLETE} does not describe a checkpoint: {error}") from error
    return Candidate(name=name, part=part, mark=mark)


def split(resume: str) -> tuple[str, str, str]:
    """Split a path or URL of a checkpoint into --ckpt.path, the step's name, and the peer's part or ""."""
    place, slash, name = resume.rstrip("/").rpartition("/")
    part = ""
    if name.startswith(PEER_PART):
        part = name
        place, slash, name = place.rpartition("/")
    return (place or ("/" if slash else ".")), name, part


def _fetch_to_node(
    store: Store,
    candidate: Candidate,
    world: World,
    stack: contextlib.ExitStack,
    reached: Callable[[Callable[[], Path]], Path],
) -> Path:
    """The checkpoint's directory on this node; each node's first rank fetches it, through `reached`."""

    def fetched() -> Path | None:
        if not world.is_first_of_node:
            return None
        return reached(lambda: stack.enter_context(store.opened(candidate)))

    found = on_every_rank(fetched)[world.node * world.num_local_ranks]
    assert found is not None
    return found
