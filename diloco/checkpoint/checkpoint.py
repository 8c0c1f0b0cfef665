"""Saves and restores a peer's training in <path>/model_step_<N>/[diloco_rank_<r>/], asynchronously and sharded.

A save copies the state to host memory, and a thread writes the copies while training continues. Each rank writes its
shards, the daemon its outer state, and rank 0 last the mark, complete.json, with the digests of all files. A directory
without a mark is not a checkpoint; one whose files do not match their digests is skipped in favour of another one.
"""

from __future__ import annotations

import contextlib
import datetime
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
from diloco.checkpoint.mark import Mark
from diloco.checkpoint.restore import OwnCheckpoints, others_state, refuse_to_begin_anew, skipped_event
from diloco.checkpoint.saver import Saver
from diloco.checkpoint.store import own_part
from diloco.errors import DilocoError
from diloco.options.flags import CkptConfig
from diloco.outer.diloco import Diloco, OuterFiles, Restored
from diloco.outer.exchange import asked_daemon
from diloco.outer.world import World, in_group, on_every_rank, on_rank_zero, summed
from diloco.train.inner import InnerLoop
from peers.core.timing import SLOWEST_LINK
from peers.state.whole_files import write_bytes, write_tensors

log = logging.getLogger(__name__)

LAST_SAVE_TIMEOUT_S = 600.0
"""How long the end of a training waits for its last checkpoint, beyond the time for its bytes over the slowest link."""
_LONGEST_LAST_SAVE_S = 6 * 3600.0
"""Never longer than this, whatever the size."""
_SAVING_TIMEOUT = datetime.timedelta(seconds=2 * _LONGEST_LAST_SAVE_S)
"""How long the saving threads of the other ranks wait while rank 0 uploads: longer than `close`, also for a save that
began before it. A rank that fails alone removes the staging directory that the others still read."""
_POLL_S = 1.0
_SIGNAL_TIMEOUT_S = 2.0
"""How long a process ended by a signal waits for its last checkpoint: less than the time until it is killed."""


class Checkpoints:
    """This peer's checkpoints. The constructor and all methods are collectives, except `discard_partial`."""

    def __init__(
        self,
        config: CkptConfig,
        world: World,
        inner: InnerLoop,
        *,
        scratch: Path,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        """`scratch` is a local directory for files being uploaded or downloaded; `beside` maps names to the contents of
        files to add to every checkpoint. Raises UserError if checkpoints cannot be kept at the path."""
        self._config, self._world, self._inner = config, world, inner
        self._own, self._beside = OwnCheckpoints(config, scratch), beside or {}
        self._store = self._own.store
        self._saver, self._copies = Saver(tells=world.is_main), shards.HostCopies()
        # A process group for the saving threads only, since training uses the other groups at the same time.
        self._group = dist.new_group(backend="gloo", timeout=_SAVING_TIMEOUT) if in_group() else None
        self._checked_step = 0
        self._num_bytes = 0
        """The size of the state in the last save, summed over the ranks."""
        self._staging: Path | None = None
        """The directory that is being written, if any."""
        self._staging_lock = threading.Lock()
        """Held to create a staging directory. `discard_partial` never releases it, so none is created afterwards."""
        self._fetched = contextlib.ExitStack()
        self._restored: Path | None = None
        """The directory from which this peer's own state was loaded, while it exists."""
        self._is_restored = False
        self._skipped: list[str] = []
        """What was wrong with each checkpoint that was skipped."""
        self._num_reported_skips = 0

    def restore(self, world_rank: int | None, needs_outer: bool) -> Restored | None:
        """Load the checkpoint that the configuration names, if any, into model and optimizer. Raises UserError.

        Without `needs_outer` the files of its outer state are neither fetched nor verified.
        """
        found = self._own.resumed(
            self._world,
            world_rank,
            self._fetched,
            self._skipped.append,
            needs_outer=needs_outer,
            run_is_alive=on_rank_zero(asked_daemon).run_is_alive,
        )
        if found is None:
            return None
        mark, directory, self._is_restored = found.mark, found.directory, True
        shards.load(directory, self._inner, rank=self._world.rank, with_random=found.is_own)
        if not found.is_own:
            return others_state(mark, directory)
        self._restored = directory
        tokens = tuple(_share(count * mark.num_ranks, self._world) for count in mark.tokens)
        return Restored(
            position=mark.position, steps_per_epoch=mark.steps_per_epoch, tokens=tokens, directory=directory
        )

    def restored_file(self, name: str) -> bytes | None:
        """The content of a `beside` file of the checkpoint that `restore` loaded, if it exists. Not after `begin`."""
        path = self._restored and self._restored / name
        return path.read_bytes() if path is not None and path.is_file() else None

    def begin(self, step: int) -> None:
        """Start at this nominal step; no save is due for earlier multiples of the interval.

        Raises UserError if training would start at step 0 because every checkpoint was damaged.
        """
        self._checked_step = step
        self._restored = None
        self._fetched.close()
        if self._config.resume is not None and not self._is_restored:
            refuse_to_begin_anew(self._config, step, self._skipped)

    def due(self, step: int) -> bool:
        """Whether a multiple of the interval has been reached since the last save."""
        interval = self._config.interval
        return interval is not None and step // interval > self._checked_step // interval

    def save(self, outer: Diloco, *, step: int, beside: Mapping[str, bytes] | None = None) -> None:
        """Copy the state of nominal step `step` to host memory and start a thread that writes it.

        `beside` has more files for this checkpoint, of which rank 0's are written. Blocks while the previous save is in
        progress. A failure does not stop training: `events` reports it.
        """
        self._checked_step, began_at = step, time.monotonic()
        if self._saver.is_busy and self._world.is_main:
            log.warning("the checkpoint of step %d waits until the previous one has been written", step)
        self._saver.wait()
        part = own_part(outer.world_rank)
        try:
            staging = on_rank_zero(lambda: self._new_directory(step, part))
            state = shards.state_to_write(self._inner, self._world.rank)
            copies = self._copies.take(state)
            self._num_bytes = summed(sum(copy.nbytes for copy in copies.values()))
            # Last: the daemon begins to write at once, which would slow the copies down.
            outer_files = outer.snapshot(staging)
        except (OSError, DilocoError) as error:
            self._discard()
            self._saver.failed(step, str(error))
            return
        commit = outer.last_commit
        mark = Mark(
            position=outer.position,
            tokens=tuple(outer.tokens),
            num_ranks=self._world.num_ranks,
            steps_per_epoch=outer.steps_per_epoch,
            contributors=tuple(commit.contributors) if commit else (),
        )
        files = {**self._beside, **(beside or {})}
        save = _Save(step, outer.world_rank, part, staging, state, copies, mark, outer_files, files)
        self._saver.begin(step, lambda: self._write(save), blocked_s=time.monotonic() - began_at)

    def events(self) -> list[dict[str, Any]]:
        """Records for metrics.jsonl of the saves that have ended since the last call.

        The first call also reports the damaged checkpoints that `restore` skipped.
        """
        skipped, self._num_reported_skips = self._skipped[self._num_reported_skips :], len(self._skipped)
        return [*map(skipped_event, skipped), *(saved.event() for saved in self._saver.ended())]

    def close(self) -> None:
        """Wait for the save in progress, for as long as its upload may take, after which it has failed on all ranks."""
        timeout_s = last_save_timeout_s(self._num_bytes)
        deadline = time.monotonic() + timeout_s
        while True:
            self._saver.wait(min(_POLL_S, max(0.0, deadline - time.monotonic())))
            states = on_every_rank(lambda: (self._saver.is_busy, time.monotonic() >= deadline))
            if not any(is_busy for is_busy, _ in states):
                return
            # Rank 0's clock decides for all.
            if states[0][1]:
                break
        # Saves begin only in `save`, so the one in progress is of this step.
        self._saver.failed(self._checked_step, f"it was not written within {timeout_s:.0f} s")
        self._discard()

    def discard_partial(self) -> None:
        """Remove half-written and half-deleted checkpoints before the process ends by a signal or an error.

        Called from another thread than `save`, which may block for ever afterwards. A save that finishes within
        _SIGNAL_TIMEOUT_S is kept.
        """
        self._fetched.close()
        self._staging_lock.acquire(timeout=_SIGNAL_TIMEOUT_S)
        self._saver.wait(_SIGNAL_TIMEOUT_S)
        self._discard()
        if (old := self._own.deleting) is not None:
            self._store.delete(old.name, old.part)

    def _new_directory(self, step: int, part: str) -> Path:
        with self._staging_lock:
            self._staging = self._store.staging(step, part)
            return self._staging

    def _write(self, save: _Save) -> int:
        """A collective of the ranks' saving threads. Returns the size of the whole checkpoint. Raises OSError."""
        try:
            num_bytes = shards.save(
                save.state,
                save.copies,
                lambda tensors, metadata: self._write_and_send(save, tensors, metadata),
                lambda files: self._finish(save, files),
                self._group,
            )
        finally:
            self._discard()
        if self._world.rank == 0:
            self._own.delete_old(save.world_rank)
        return num_bytes

    def _write_and_send(
        self, save: _Save, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> shards.Files:
        """Write this rank's files and send them to the store."""
        if self._world.rank:
            # Rank 0 created the staging directory. For a URL it is local to a node, so other nodes need their own.
            with self._staging_lock:
                save.staging.mkdir(parents=True, exist_ok=True)
                self._staging = save.staging
        name = shards.file_of(self._world.rank)
        files = {name: write_tensors(save.staging / name, tensors, metadata)}
        if self._world.rank == 0:
            for name, content in save.beside.items():
                (save.staging / name).parent.mkdir(exist_ok=True)
                files[name] = write_bytes(save.staging / name, content)
            files |= save.outer.wait().files
        self._store.send(save.staging, files, save.step, save.part)
        return files

    def _finish(self, save: _Save, files: shards.Files) -> None:
        mark = replace(save.mark, files=files, head=save.outer.wait().head)
        self._own.complete(save.staging, mark, save.step, save.world_rank)

    def _discard(self) -> None:
        """Remove the staging directory unless the checkpoint is complete. Safe to repeat."""
        staging, self._staging = self._staging, None
        if staging is not None:
            self._store.discard(staging)


def last_save_timeout_s(num_bytes: int) -> float:
    """How long the end of a training waits for its last checkpoint; `num_bytes` are those of all ranks."""
    # Twice the ranks' bytes: the daemon's files are about as large.
    return min(LAST_SAVE_TIMEOUT_S + 2 * num_bytes / SLOWEST_LINK, _LONGEST_LAST_SAVE_S)


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
    """The mark without `files` and `head`, which are known only after writing."""
    outer: OuterFiles
    beside: Mapping[str, bytes]


def _share(count: int, world: World) -> int:
    """This rank's part of a count over all ranks; a checkpoint may have been saved by another number of ranks."""
    return count // world.num_ranks + (world.rank < count % world.num_ranks)
