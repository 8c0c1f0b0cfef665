"""Finds the checkpoint of --ckpt.resume, fetches and verifies it: the same one on all ranks of a peer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from diloco.checkpoint.choice import Candidate
from diloco.checkpoint.dirs import own_part
from diloco.checkpoint.finder import Finder, candidates_in
from diloco.checkpoint.mark import Mark, problems_of
from diloco.checkpoint.shards import file_of
from diloco.checkpoint.store import Store
from diloco.errors import UserError
from diloco.options.flags import CkptConfig
from diloco.outer.diloco import Restored
from diloco.outer.world import World, on_every_rank, on_rank_zero


@dataclass(frozen=True)
class Found:
    """A checkpoint whose files have all been verified."""

    mark: Mark
    directory: Path
    is_own: bool


def registered(store: Store, path: str, world_rank: int | None) -> int:
    """Register this peer at the store and remove its half-written checkpoints.

    Returns when its newest checkpoint there was saved (Unix time in ms; 0 if there is none). Raises UserError.
    """
    part = own_part(world_rank)
    try:
        store.clear(part)
        if world_rank is not None:
            store.register(world_rank)
        return max((one.mark.saved_at_ms for one in candidates_in(store, part)), default=0)
    except OSError as error:
        raise UserError(
            f"--ckpt.path {path} cannot be written to: {error.strerror or error}. Name another place, or leave out "
            "--ckpt.interval to save nothing"
        ) from error


def fetched(
    config: CkptConfig,
    world: World,
    world_rank: int | None,
    scratch: Path,
    stack: contextlib.ExitStack,
    *,
    on_skipped: Callable[[str], None] = lambda problem: None,
) -> Found | None:
    """The checkpoint to resume; its directory exists until the stack is closed. A collective. Raises UserError.

    If this peer has no checkpoint, it may be another peer's. `on_skipped` is called on rank 0 with what is wrong with
    each checkpoint that was skipped.
    """
    if config.resume is None:
        return None
    finder = Finder(config.resume, config.path, world_rank, scratch, on_skipped=on_skipped)
    try:
        while (candidate := on_rank_zero(finder.next)) is not None:
            directory = _fetch_to_node(finder.store, candidate, world, stack)
            problems = [
                found
                for each in on_every_rank(partial(_problems, directory, candidate.mark, world))
                for found in each
            ]
            if not problems:
                return Found(candidate.mark, directory, candidate.is_own)
            stack.close()
            name = finder.store.name_of(candidate.name, candidate.part)
            on_rank_zero(partial(finder.refuse, candidate, problems[0].replace(str(directory), name)))
    except OSError as error:
        raise UserError(f"--ckpt.resume {config.resume}: {error}") from error
    return None


def others_state(mark: Mark, directory: Path) -> Restored:
    """Restore only the outer state of another peer's checkpoint: the agreed weights at the start of the epoch."""
    position, tokens = replace(mark.position, local_step=0), (0,) * len(mark.tokens)
    return Restored(position=position, tokens=tokens, directory=directory, is_own=False)


def refuse_to_begin_anew(config: CkptConfig, step: int, skipped: Sequence[str]) -> None:
    """Raise UserError if training would start at step 0 because all checkpoints were damaged.

    A collective; `skipped` matters on rank 0 only.
    """

    def check() -> None:
        if step == 0 and skipped:
            raise UserError(
                f"no checkpoint in {config.path} that this peer could go on from is whole: {'; '.join(skipped[:3])}. "
                "Leave out --ckpt.resume to begin anew"
            )

    on_rank_zero(check)


def skipped_event(problem: str) -> dict[str, Any]:
    """The metrics.jsonl event for a damaged checkpoint that was skipped."""
    return {"event": "checkpoint_skipped", "reason": problem}


def _fetch_to_node(store: Store, candidate: Candidate, world: World, stack: contextlib.ExitStack) -> Path:
    """The checkpoint's directory on this node; each node's local rank 0 fetches it. Raises OSError."""

    def fetched() -> Path | None:
        is_first = world.local_rank == 0
        return stack.enter_context(store.opened(candidate.name, candidate.part)) if is_first else None

    found = on_every_rank(fetched)[world.node * world.num_local_ranks]
    assert found is not None
    return found


def _problems(directory: Path, mark: Mark, world: World) -> list[str]:
    """What is wrong with this rank's share of the files. The ranks divide the files, so each is verified once."""
    by_name = {file_of(rank): rank % world.num_ranks for rank in range(mark.num_ranks)}
    mine = {name: record for name, record in mark.files.items() if by_name.get(name, 0) == world.rank}
    return problems_of(directory, mine)
