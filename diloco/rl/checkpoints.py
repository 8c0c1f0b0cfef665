"""Moves the checkpoints of TRL's trainer to <ckpt.path>/model_step_<N>/[diloco_rank_<r>/], and writes deltas."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.callback import checkpoint_of
from diloco.checkpoint.digests import flushed_records
from diloco.checkpoint.mark import COMPLETE, mark_of, mark_whole, names_below, read_mark
from diloco.checkpoint.restore import Found, OwnCheckpoints
from diloco.checkpoint.saver import Saved
from diloco.checkpoint.store import own_part
from diloco.options.flags import CkptConfig
from diloco.outer.diloco import Diloco
from diloco.outer.world import World, barrier, on_rank_zero
from diloco.rl.deltas import DeltaWriter

log = logging.getLogger(__name__)


class KeepCheckpoints(TrainerCallback):
    """Moves the trainer's checkpoints to the store. Must come after DilocoCallback, which adds the swarm's state."""

    def __init__(
        self,
        config: CkptConfig,
        outer: Callable[[], Diloco],
        world: World,
        world_rank: int | None,
        *,
        scratch: Path,
        finish_save: Callable[[], None],
        on_event: Callable[..., None] = lambda **_: None,
    ) -> None:
        """`scratch` is a local directory for files being uploaded or downloaded. Raises UserError.

        `finish_save` is DilocoCallback's. `on_event` is called with the outcome of each save, for metrics.jsonl.
        """
        self._finish_save = finish_save
        self._on_event, self._outer, self._world, self._world_rank = on_event, outer, world, world_rank
        self._own = OwnCheckpoints(config, scratch)

    def restore(
        self,
        stack: contextlib.ExitStack,
        on_skipped: Callable[[str], None],
        *,
        needs_outer: bool,
        run_is_alive: bool,
    ) -> Found | None:
        """The checkpoint that --ckpt.resume means; its directory exists until the stack is closed. Raises UserError.

        `on_skipped` is called with what is wrong with each checkpoint that is skipped. Without `needs_outer` the files
        of the outer state are neither fetched nor verified. If `run_is_alive`, its own checkpoint comes first.
        """
        return self._own.resumed(
            self._world,
            self._world_rank,
            stack,
            on_skipped,
            needs_outer=needs_outer,
            run_is_alive=run_is_alive,
        )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        written = checkpoint_of(args, state)
        # Every rank writes files of its own into the checkpoint: wait until all have.
        barrier()
        self._finish_save()
        on_rank_zero(lambda: self._try_to_keep(written, state.global_step))

    def _try_to_keep(self, written: Path, step: int) -> None:
        """Move the checkpoint; a failure is logged and reported, since a full disk must not end the training."""
        began_at, reason, num_bytes = time.monotonic(), "", 0
        try:
            num_bytes = self._keep(written, step)
        except OSError as error:
            reason = str(error)
            log.error("the checkpoint of step %d was not saved: %s", step, error)
            shutil.rmtree(written, ignore_errors=True)
        seconds = time.monotonic() - began_at
        saved = Saved(step=step, num_bytes=num_bytes, seconds=seconds, blocked_s=seconds, reason=reason)
        self._on_event(**saved.event())

    def _keep(self, written: Path, step: int) -> int:
        """Move the checkpoint to the store and delete old ones. Returns its size in bytes. Raises OSError."""
        outer = self._outer()
        if (written / COMPLETE).is_file():
            mark = read_mark(written)
        elif outer.active or not written.is_dir():
            raise OSError("it was not written completely; the log above says why")
        else:
            files = flushed_records(written, names_below(written))
            mark = mark_whole(written, mark_of(outer, num_ranks=self._world.num_ranks), files)
        self._own.store.send(written, mark.files, step, own_part(outer.world_rank))
        self._own.complete(written, mark, step, outer.world_rank)
        self._own.delete_old(outer.world_rank)
        return sum(record.num_bytes for record in mark.files.values())


class KeepDeltas(TrainerCallback):
    """Writes delta checkpoints. Must come after DilocoCallback, so that a step's weights include its outer step."""

    def __init__(self, directory: Path, *, interval: int, weights: Callable[[], dict[str, Tensor]]) -> None:
        """`weights` returns all weights, at least on rank 0; it is a collective."""
        self._directory, self._interval, self._weights = directory, interval, weights
        self._writer: DeltaWriter | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step, weights = state.global_step, self._weights()

        def open_writer() -> None:
            self._writer = DeltaWriter(self._directory, step=step)
            self._try_to_write(step, weights)

        on_rank_zero(open_writer)
        self._checked_step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        before, self._checked_step = self._checked_step, state.global_step
        # Not `% interval == 0`: an outer step may advance the nominal step by several.
        if state.global_step // self._interval > before // self._interval:
            step, weights = state.global_step, self._weights()
            on_rank_zero(lambda: self._try_to_write(step, weights))

    def _try_to_write(self, step: int, weights: dict[str, Tensor]) -> None:
        """A failure is only logged, since a full disk must not end the training: the next delta covers both steps."""
        assert self._writer is not None
        try:
            self._writer.write(step, weights.items())
        except OSError as error:
            log.error("the delta checkpoint of step %d was not saved: %s", step, error)
