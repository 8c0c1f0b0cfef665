"""A trainer's checkpoints at the place where all of ours are: <ckpt.path>/model_step_<N>/[diloco_rank_<r>/]."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.callback import checkpoint_of
from diloco.checkpoint_dirs import COMPLETE, complete_ones, delete, move, own_part, write_complete
from diloco.errors import UserError
from diloco.grpo.deltas import DeltaWriter
from diloco.options import CkptConfig
from diloco.outer import Diloco
from diloco.world import World, on_rank_zero


class KeepCheckpoints(TrainerCallback):
    """Give it to the trainer after DilocoCallback, which adds the swarm's state to what is moved here."""

    def __init__(self, config: CkptConfig, outer: Callable[[], Diloco], world: World) -> None:
        self._config, self._outer, self._world = config, outer, world

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        written = checkpoint_of(args, state)
        on_rank_zero(lambda: self._keep(written, state.global_step))

    def _keep(self, written: Path, step: int) -> None:
        outer, path = self._outer(), Path(self._config.path)
        part = own_part(outer.world_rank)
        if not (written / COMPLETE).is_file():
            write_complete(written, outer, self._world.num_ranks)
        final = path / f"model_step_{step}" / part
        final.parent.mkdir(parents=True, exist_ok=True)
        move(written, final)
        for old in complete_ones(path, part)[: -self._config.topk] if self._config.topk else []:
            delete(old)


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
            self._writer.write(step, weights.items())

        on_rank_zero(open_writer)
        self._looked_at = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        before, self._looked_at = self._looked_at, state.global_step
        # Passed, not met: nominal steps may be skipped.
        if state.global_step // self._interval > before // self._interval:
            step, weights = state.global_step, self._weights()
            on_rank_zero(lambda: self._writer and self._writer.write(step, weights.items()))


def found_checkpoint(config: CkptConfig, part: str) -> Path | None:
    """The directory that --ckpt.resume means for this peer. Raises UserError where there is none of that name."""
    if config.resume is None:
        return None
    if config.resume == "auto":
        return next(reversed(complete_ones(Path(config.path), part)), None)
    directory = Path(config.resume) / part
    if not (directory / COMPLETE).is_file():
        raise UserError(f"--ckpt.resume {config.resume}: there is no complete checkpoint in {directory}")
    return directory
