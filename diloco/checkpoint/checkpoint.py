"""Save and restore a peer's training, shard by shard, while it goes on: <path>/model_step_<N>/[diloco_rank_<r>/].

A save takes a copy of everything at one moment; a thread then writes it. Each rank writes the shards that it holds, the
daemon its outer state, and rank 0 the mark with everybody's digests, last. What has no mark is no checkpoint, and what
is not as its mark says is skipped for the one before it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from diloco.checkpoint import shards
from diloco.checkpoint.choice import Candidate, to_delete
from diloco.checkpoint.dirs import own_part
from diloco.checkpoint.finder import candidates_in
from diloco.checkpoint.mark import Mark, write_mark
from diloco.checkpoint.restore import fetched, others_state, refuse_to_begin_anew, registered, skipped_event
from diloco.checkpoint.saver import Saver
from diloco.checkpoint.store import Store, open_store
from diloco.errors import DilocoError
from diloco.options.flags import CkptConfig
from diloco.outer.diloco import Diloco, OuterFiles, Restored
from diloco.outer.world import GROUP_TIMEOUT, World, in_group, on_rank_zero
from diloco.train.inner import InnerLoop
from peers.state.whole_files import write_bytes, write_tensors

log = logging.getLogger(__name__)

LAST_SAVE_TIMEOUT_S = 600.0
"""How long the end of a training waits for its last checkpoint."""
_SIGNAL_TIMEOUT_S = 2.0
"""How long the end of the process by a signal does: less than it is given before it is killed."""


class Checkpoints:
    """This peer's checkpoints. All ranks construct it and call its methods together."""

    def __init__(
        self,
        config: CkptConfig,
        world: World,
        inner: InnerLoop,
        *,
        scratch: Path,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        """`scratch` is a local directory for what is on its way to or from a URL; `beside` are files, by name, that go
        into every checkpoint. Raises UserError where the path is no place for checkpoints."""
        self._config, self._world, self._inner = config, world, inner
        self._scratch, self._beside = scratch, beside or {}
        self._store: Store = open_store(config.path, scratch)
        self._saver, self._copies = Saver(tells=world.is_main), shards.HostCopies()
        # Of the saving threads: training uses the other groups meanwhile.
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if in_group() else None
        self._looked_at = self._saved_at_ms = self._number = 0
        self._contributors: tuple[int, ...] = ()
        self._loss: float | None = None
        self._staging: Path | None = None
        """The directory that is being written just now."""
        self._deleting: Candidate | None = None
        self._making = threading.Lock()
        """Held while a directory is made and noted, and by whoever has discarded it: none is made after that."""
        self._fetched = contextlib.ExitStack()
        self._registered: int | None = None
        """The world rank of which others know that it has saved."""
        self._is_restored = False
        self._skipped: list[str] = []
        """What was wrong with checkpoints that were passed over."""
        self._num_told = 0

    def restore(self, world_rank: int | None) -> Restored | None:
        """Load the checkpoint that the configuration names into model and optimizer. Raises UserError."""
        if self._config.interval is not None:
            self._saved_at_ms = on_rank_zero(lambda: registered(self._store, self._config.path, world_rank))
        found = fetched(
            self._config,
            self._world,
            world_rank,
            self._scratch,
            self._fetched,
            on_skipped=self._skipped.append,
        )
        if found is None:
            return None
        mark, directory, self._is_restored = found.mark, found.directory, True
        shards.load(directory, self._inner, rank=self._world.rank, with_random=found.is_own)
        self._contributors, self._number = mark.contributors, mark.number + 1
        if not found.is_own:
            return others_state(mark, directory)
        tokens = tuple(_share(count * mark.num_ranks, self._world) for count in mark.tokens)
        return Restored(position=mark.position, tokens=tokens, directory=directory)

    def begin(self, step: int) -> None:
        """The run goes on from this nominal step: what lies before it was due before.

        Raises UserError where it is the first, and would not be if a checkpoint were whole.
        """
        self._looked_at = step
        self._fetched.close()
        if self._config.resume is not None and not self._is_restored:
            refuse_to_begin_anew(self._config, step, self._skipped)

    def due(self, step: int) -> bool:
        """Whether a multiple of the interval has been reached since the last save."""
        interval = self._config.interval
        return interval is not None and step // interval > self._looked_at // interval

    def scored(self, loss: float) -> None:
        """An evaluation of the weights: the next checkpoint is as good as this says."""
        self._loss = loss

    def save(self, outer: Diloco, *, step: int) -> None:
        """Copy everything that is needed to go on from nominal step `step`; it is written while training goes on.

        Waits where the save before is still under way. Where it cannot be saved, `events` says so, and nothing stops.
        """
        self._looked_at, began_at = step, time.monotonic()
        if self._saver.is_busy and self._world.is_main:
            log.warning("the checkpoint of step %d waits until the one before has been written", step)
        self._saver.wait()
        part = own_part(outer.world_rank)
        try:
            staging = on_rank_zero(lambda: self._new_directory(step, part))
            state = shards.state_to_write(self._inner, self._world.rank)
            copies = self._copies.take(state)
            # Last, since the daemon begins to write, and would take time from the copies.
            outer_files = outer.snapshot(staging)
        except (OSError, DilocoError) as error:
            self._discard()
            self._saver.failed(step, str(error))
            return
        if outer.last_commit is not None and outer.last_commit.contributors:
            self._contributors = tuple(outer.last_commit.contributors)
        mark = Mark(
            position=outer.position,
            tokens=tuple(outer.tokens),
            num_ranks=self._world.num_ranks,
            number=self._number,
            contributors=self._contributors,
            loss=self._loss,
        )
        self._loss = None
        self._number += 1
        save = _Save(step, outer.world_rank, part, staging, state, copies, mark, outer_files)
        self._saver.begin(step, lambda: self._write(save), blocked_s=time.monotonic() - began_at)

    def events(self) -> list[dict[str, Any]]:
        """What became of the saves that have ended since the last call, for metrics.jsonl.

        Before them, in the first, the checkpoints that were not whole and so not gone on from.
        """
        skipped, self._num_told = self._skipped[self._num_told :], len(self._skipped)
        return [*map(skipped_event, skipped), *(saved.event() for saved in self._saver.ended())]

    def close(self) -> None:
        """The end of the training: wait for what is being written, under a deadline."""
        if not self._saver.wait(LAST_SAVE_TIMEOUT_S):
            log.error("the last checkpoint was not written within %g s", LAST_SAVE_TIMEOUT_S)
            self._discard()

    def discard_partial(self) -> None:
        """Leave nothing half-written or half-deleted, when the process is about to end in the middle of it.

        Called by another thread than the one that saves, which may block from now on. What can be finished in a moment
        is.
        """
        self._fetched.close()
        self._making.acquire(timeout=_SIGNAL_TIMEOUT_S)
        self._saver.wait(_SIGNAL_TIMEOUT_S)
        self._discard()
        if (old := self._deleting) is not None:
            self._store.delete(old.name, old.part)

    def _new_directory(self, step: int, part: str) -> Path:
        with self._making:
            self._staging = self._store.staging(step, part)
            return self._staging

    def _write(self, save: _Save) -> int:
        """All ranks' threads do it together. Returns the bytes of the whole checkpoint. Raises OSError."""
        try:
            num_bytes = shards.save(
                save.state,
                save.copies,
                lambda tensors, metadata: self._sent(save, tensors, metadata),
                lambda files: self._finish(save, files),
                self._group,
            )
        finally:
            self._discard()
        if self._world.rank == 0:
            self._delete_old(save.part)
        return num_bytes

    def _sent(self, save: _Save, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> shards.Files:
        """Write what this rank has, and give it to the store."""
        if self._world.rank:
            # On another node what goes to a URL is put together in a directory of its own.
            with self._making:
                save.staging.mkdir(parents=True, exist_ok=True)
                self._staging = save.staging
        name = shards.file_of(self._world.rank)
        files = {name: write_tensors(save.staging / name, tensors, metadata)}
        if self._world.rank == 0:
            for name, content in self._beside.items():
                (save.staging / name).parent.mkdir(exist_ok=True)
                files[name] = write_bytes(save.staging / name, content)
            files |= save.outer.wait().files
        self._store.send(save.staging, files, save.step, save.part)
        return files

    def _finish(self, save: _Save, files: shards.Files) -> None:
        self._saved_at_ms = max(self._saved_at_ms + 1, time.time_ns() // 1_000_000)
        mark = replace(save.mark, files=files, saved_at_ms=self._saved_at_ms, head=save.outer.wait().head)
        write_mark(save.staging, mark)
        self._store.finish(save.staging, save.step, save.part)
        if save.world_rank not in (None, self._registered):
            # Else with the next one: this one is whole.
            with contextlib.suppress(OSError):
                self._store.register(save.world_rank, has_saved=True)
                self._registered = save.world_rank

    def _delete_old(self, part: str) -> None:
        """Of this peer's own those that are too many; other peers' are theirs to delete."""
        try:
            kept = candidates_in(self._store, part)
            for old in to_delete(kept, topk=self._config.topk, keep=self._config.keep):
                self._deleting = old
                self._store.delete(old.name, old.part)
                self._deleting = None
        except OSError as error:
            log.error("an old checkpoint was not deleted: %s", error)

    def _discard(self) -> None:
        """Unless it has been finished, remove what was being written. Safe to repeat."""
        staging, self._staging = self._staging, None
        if staging is not None:
            self._store.discard(staging)


@dataclass(frozen=True)
class _Save:
    """One rank's part of a save."""

    step: int
    world_rank: int | None
    part: str
    staging: Path
    state: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]
    mark: Mark
    """Still without the files."""
    outer: OuterFiles


def _share(count: int, world: World) -> int:
    """This rank's part of what all ranks together have trained, whatever their number was."""
    return count // world.num_ranks + (world.rank < count % world.num_ranks)
