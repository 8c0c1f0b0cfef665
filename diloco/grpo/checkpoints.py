"""A trainer's checkpoints at the place where all of ours are: <ckpt.path>/model_step_<N>/[diloco_rank_<r>/]."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.callback import checkpoint_of
from diloco.checkpoints.choice import to_delete
from diloco.checkpoints.dirs import own_part
from diloco.checkpoints.finder import candidates_in
from diloco.checkpoints.mark import COMPLETE, mark_whole, read_mark
from diloco.checkpoints.restore import fetched, registered, skipped_event
from diloco.checkpoints.store import Store, open_store
from diloco.grpo.deltas import DeltaWriter
from diloco.options import CkptConfig
from diloco.outer import Diloco
from diloco.world import World, on_rank_zero

log = logging.getLogger(__name__)


class KeepCheckpoints(TrainerCallback):
    """Give it to the trainer after DilocoCallback, which adds the swarm's state to what is moved here."""

    def __init__(
        self, config: CkptConfig, outer: Callable[[], Diloco], world: World, *, scratch: Path
    ) -> None:
        """`scratch` is a local directory for what is on its way to a URL. Raises UserError."""
        self._config, self._outer, self._world = config, outer, world
        self._store = open_store(config.path, scratch)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        written = checkpoint_of(args, state)
        on_rank_zero(lambda: self._try_to_keep(written, state.global_step))

    def _try_to_keep(self, written: Path, step: int) -> None:
        """A disk that is full ends no training."""
        try:
            self._keep(written, step)
        except OSError as error:
            log.error("the checkpoint of step %d was not saved: %s", step, error)
            shutil.rmtree(written, ignore_errors=True)

    def _keep(self, written: Path, step: int) -> None:
        outer, store = self._outer(), self._store
        part = own_part(outer.world_rank)
        if (written / COMPLETE).is_file():
            mark = read_mark(written)
        else:
            mark = mark_whole(written, outer, num_ranks=self._world.num_ranks)
        store.send(written, mark.files, step, part)
        store.finish(written, step, part)
        for old in to_delete(candidates_in(store, part), topk=self._config.topk, keep="last"):
            store.delete(old.name, old.part)


class KeepDeltas(TrainerCallback):
    """Give it to the trainer after DilocoCallback, so that a step's weights are those after its outer step."""

    def __init__(self, directory: Path, *, interval: int, weights: Callable[[], dict[str, Tensor]]) -> None:
        """`weights` gives all of them, on rank 0 at least; all ranks call it."""
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
        self._looked_at = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        before, self._looked_at = self._looked_at, state.global_step
        # Passed, not met: nominal steps may be skipped.
        if state.global_step // self._interval > before // self._interval:
            step, weights = state.global_step, self._weights()
            on_rank_zero(lambda: self._try_to_write(step, weights))

    def _try_to_write(self, step: int, weights: dict[str, Tensor]) -> None:
        """A disk that is full ends no training: the next delta holds what has changed since the last one."""
        assert self._writer is not None
        try:
            self._writer.write(step, weights.items())
        except OSError as error:
            log.error("the delta checkpoint of step %d was not saved: %s", step, error)


def checkpoint_to_resume(
    config: CkptConfig,
    world: World,
    world_rank: int | None,
    scratch: Path,
    stack: contextlib.ExitStack,
    on_event: Callable[..., None],
) -> Path | None:
    """The directory that --ckpt.resume means for this peer, until the stack is closed. Raises UserError.

    What another peer has saved is no use to a trainer, which wants its own state back. `on_event` is told of each that
    is passed over.
    """
    if config.interval is not None:
        store: Store = open_store(config.path, scratch)
        on_rank_zero(lambda: registered(store, config.path, world_rank))

    def told(problem: str) -> None:
        on_event(**skipped_event(problem))

    found = fetched(config, world, world_rank, scratch, stack, own_only=True, on_skipped=told)
    return found.directory if found else None
