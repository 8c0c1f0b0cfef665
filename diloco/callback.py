"""Runs a transformers Trainer, or one of TRL's trainers, as a peer's worker.

trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[DilocoCallback()])
trainer.train()

The outer step runs in `on_step_end`: after the optimizer's step, and before logging, evaluation, saving and TRL's
next push of weights to an inference server. Only parameters that require a gradient are averaged: the whole model, or
the adapters under PEFT. Without a daemon (no DILOCO_LINK in the environment) the callback does nothing.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.checkpoint.digests import checked_mark, records_by_ranks
from diloco.checkpoint.mark import COMPLETE, Mark, mark_of, mark_whole
from diloco.checkpoint.restore import others_state
from diloco.errors import DilocoError, UserError
from diloco.outer.diloco import Commit, Diloco, Restored
from diloco.outer.outer_files import OuterFiles
from diloco.outer.world import barrier, on_rank_zero, world_of_worker
from peers.state.whole_files import FileRecord

log = logging.getLogger(__name__)

# Distance between two peers' sampler seeds. A sampler adds 1 to its seed every pass, so small distances would collide.
_SEED_STRIDE = 1_000_003


class DilocoCallback(TrainerCallback):
    """Use one instance per trainer. `outer` is None until `on_train_begin`.

    Training starts from the swarm's weights and ignores those of the trainer's model, unless the swarm resumes from
    this peer's own checkpoint. `state.global_step` and the learning rate are set to the run's nominal step, so a peer
    that joins late continues at the step of the others. Each checkpoint of the trainer (`checkpoint-<N>`) also gets
    the swarm's state; `trainer.train(resume_from_checkpoint=...)` then resumes bit for bit. Rollouts that TRL has
    generated are not saved: if one generation serves several steps, save only at a multiple of `generation_period`.
    """

    def __init__(
        self,
        *,
        local_steps: int | None = None,
        on_commit: Callable[[Commit], None] | None = None,
        resume: Path | None = None,
        is_own: bool = True,
    ) -> None:
        """`local_steps` (H) defaults to the swarm's value; `on_commit` is called after every outer step.

        `resume` is the checkpoint passed to `train(resume_from_checkpoint=...)`; default: the one named in the
        TrainingArguments, else `checkpoint-<N>` in the output directory. With `is_own=False` it is another peer's
        checkpoint: only the swarm's state is read from it, and the trainer itself must not resume from it.
        """
        self.outer: Diloco | None = None
        self._local_steps = local_steps
        self._on_commit = on_commit
        self._resume, self._is_own = resume, is_own
        self._tokens_seen = 0
        self._is_save_postponed = False
        self._saving: threading.Thread | None = None
        """On rank 0: waits for the daemon's part of the last checkpoint and writes the mark. The process ends after it,
        also if training has failed."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        lr_scheduler: LRScheduler | None = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Wait for the swarm and load its weights. Raises UserError as `check_divides` does, and if a trainer that has
        resumed would begin the run anew.

        Gives each peer its own shuffling seed: with a common seed all peers would train on the same samples.
        """
        assert model is not None
        self.finish_save()
        self.outer = Diloco(
            model,
            local_steps=self._local_steps,
            max_steps=state.max_steps if state.max_steps > 0 else None,
            restore=partial(self._restore, args, state),
            # If rollouts serve several steps, a late commit must not change the weights between those steps.
            goes_ahead=generation_period(args) == 1,
        )
        self._tokens_seen = state.num_input_tokens_seen
        if self.outer.active:
            if state.global_step > 0 and self.outer.began_run and self.outer.nominal_step == 0:
                self._refuse_to_begin_anew(args, state)
            check_divides(args, steps_per_epoch=self.outer.steps_per_epoch)
            self._follow_nominal_step(state, lr_scheduler)
            if train_dataloader is not None:
                shuffle_by_world_rank(train_dataloader, args, self.outer.world_rank or 0)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Keep the run's final weights where training begins at its end: transformers makes one step all the same."""
        if self._joined.active and self._joined.done:
            # Neither of them is enough: weights decay without a gradient, and a gradient may be NaN.
            optimizer.zero_grad(set_to_none=False)
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LRScheduler | None = None,
        **kwargs: Any,
    ) -> None:
        """Count the step, and average if it ends an epoch. Raises what Diloco.step raises."""
        outer = self._joined
        if not outer.active:
            return
        outer.step(
            num_tokens=self._new_tokens(args, state),
            loss=_last_loss(state),
            is_save_due=self._is_save_postponed,
        )
        self._call_on_commit(outer)
        before, reached_end = state.global_step, state.global_step >= state.max_steps
        self._follow_nominal_step(state, lr_scheduler)
        _set_due(args, state, control, before)
        if outer.done:
            control.should_training_stop = True
        elif reached_end and state.global_step < state.max_steps:
            # This peer abandoned its fork and adopted weights from an earlier step, so training is not over.
            control.should_training_stop = False
        self._postpone_save_in_flight(outer, control)
        self._finish_save_before_others_are_deleted(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Postpone a checkpoint of `save_strategy="epoch"` while an outer step is in flight, as `on_step_end` does."""
        if self._joined.active:
            self._postpone_save_in_flight(self._joined, control)
            self._finish_save_before_others_are_deleted(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Be ready for the checkpoint that `save_strategy="best"` may write now."""
        if self.outer is not None and self.outer.active and args.save_strategy == "best":
            self.finish_save()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Have the daemon add the swarm's state to the checkpoint that the trainer has just written.

        Training continues meanwhile; the checkpoint is complete once `finish_save` returns. A failure is only logged.
        """
        outer, directory = self._joined, checkpoint_of(args, state)
        if not outer.active or outer.in_flight:
            return
        self.finish_save()
        # Every rank writes files of its own into the checkpoint: wait until all have.
        barrier()
        try:
            if on_rank_zero(directory.is_dir):
                world, mark = world_of_worker(os.environ), mark_of(outer, num_ranks=args.world_size)
                written = outer.snapshot(directory)
                files = records_by_ranks(directory, world)
                if world.is_main:
                    self._saving = threading.Thread(
                        target=_complete, args=(directory, mark, files, written), name="checkpoint"
                    )
                    self._saving.start()
        except (DilocoError, OSError) as error:
            _log_failure(directory, error)
        if control.should_training_stop:
            self.finish_save()

    def finish_save(self) -> None:
        """Wait until the last checkpoint is complete, or has failed. A collective; repeating it is safe."""

        def wait() -> None:
            if self._saving is not None:
                self._saving.join()
                self._saving = None

        on_rank_zero(wait)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average the steps of the unfinished epoch, and leave the swarm. Raises DilocoError if the data ended first.

        Without averaging where the trainer has loaded its best model: that is older than the steps, and is to be kept.
        """
        outer, was_stopped = self._joined, control.should_training_stop
        if outer.active:
            # The daemon may end once this peer has left.
            self.finish_save()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            outer.leave()
        else:
            outer.finish()
            self._call_on_commit(outer)
        if outer.active and not was_stopped and not outer.is_at_end:
            # transformers limits the passes over the data to those of a run in which no step is trained twice.
            raise DilocoError(
                f"the trainer's data ended at step {outer.nominal_step} of {state.max_steps}, as they do if a peer "
                "trains steps again after a lost fork or a restart; the next start goes on from there, if it does not "
                "resume from a checkpoint that is ahead of the swarm"
            )

    @property
    def _joined(self) -> Diloco:
        if self.outer is None:
            raise UserError(
                "DilocoCallback was added after training had begun; pass it to the Trainer before train()"
            )
        return self.outer

    def _call_on_commit(self, outer: Diloco) -> None:
        for commit in outer.commits:
            if self._on_commit:
                self._on_commit(commit)

    def _restore(
        self, args: TrainingArguments, state: TrainerState, world_rank: int | None, needs_outer: bool
    ) -> Restored | None:
        """The position in the run. The trainer has restored the weights and the optimizer itself."""
        if world_rank is None:
            return None
        world = world_of_worker(os.environ)
        if self._resume is not None and not self._is_own:
            return others_state(checked_mark(self._resume, world, needs_outer=needs_outer), self._resume)
        if state.global_step == 0:
            return None
        directory = self._resumed_from(args, state)
        if not on_rank_zero((directory / COMPLETE).is_file):
            return None
        mark = checked_mark(directory, world, needs_outer=needs_outer)
        if mark.num_ranks != args.world_size:
            raise UserError(
                f"{directory} was saved by {mark.num_ranks} ranks, but this peer has {args.world_size}; "
                f"start it with {mark.num_ranks}"
            )
        return Restored(
            position=mark.position,
            steps_per_epoch=mark.steps_per_epoch,
            tokens=mark.tokens,
            directory=directory,
        )

    def _resumed_from(self, args: TrainingArguments, state: TrainerState) -> Path:
        return Path(str(self._resume or args.resume_from_checkpoint or checkpoint_of(args, state)))

    def _refuse_to_begin_anew(self, args: TrainingArguments, state: TrainerState) -> None:
        """Raise UserError if the checkpoint that the trainer has resumed from has no whole state of the swarm."""
        directory = self._resumed_from(args, state)
        if not on_rank_zero((directory / COMPLETE).is_file):
            raise UserError(
                f"the trainer has resumed at step {state.global_step}, but the swarm begins at step 0: {directory} has "
                f"no {COMPLETE}, so the swarm's state is missing or incomplete. Resume from another checkpoint, name "
                "the right one in DilocoCallback(resume=...), or begin anew without resume_from_checkpoint"
            )

    def _new_tokens(self, args: TrainingArguments, state: TrainerState) -> int:
        """This rank's tokens since the last step, or its number of samples if the trainer does not count tokens."""
        if not state.num_input_tokens_seen:
            return args.per_device_train_batch_size * args.gradient_accumulation_steps
        new, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
        return int(new) // args.world_size

    def _follow_nominal_step(self, state: TrainerState, lr_scheduler: LRScheduler | None) -> None:
        assert self.outer is not None
        if state.global_step != self.outer.nominal_step:
            state.global_step = self.outer.nominal_step
            _set_schedule(lr_scheduler, state.global_step)

    def _postpone_save_in_flight(self, outer: Diloco, control: TrainerControl) -> None:
        """Postpone a due checkpoint while an outer step is in flight: it would hold only half of that step's result."""
        if outer.in_flight:
            self._is_save_postponed |= control.should_save
            control.should_save = False
        elif self._is_save_postponed:
            control.should_save, self._is_save_postponed = True, False

    def _finish_save_before_others_are_deleted(self, control: TrainerControl) -> None:
        """To be called while `control` says what the trainer does next: with its next checkpoint, and at its end, it
        deletes older ones (save_total_limit), among which may be one that is not complete yet."""
        if control.should_save or control.should_training_stop:
            self.finish_save()


def _complete(directory: Path, mark: Mark, files: Mapping[str, FileRecord], written: OuterFiles) -> None:
    """Write the mark of a checkpoint as soon as the daemon has written its part."""
    try:
        mark_whole(directory, mark, {**files, **written.wait().files})
    except Exception as error:  # noqa: BLE001
        # Whatever it is, it must not end the training: if the daemon is gone, the next outer step says so.
        _log_failure(directory, error)


def _log_failure(directory: Path, error: Exception) -> None:
    log.error("the swarm's state was not saved, so %s cannot be resumed: %s", directory, error)


def shuffle_by_world_rank(dataloader: Any, args: TrainingArguments, world_rank: int) -> None:
    """Give the trainer's sampler a seed that differs between peers; warn if the sampler has no seed."""
    sampler = get_sampler(dataloader)
    seed = args.seed if args.data_seed is None else args.data_seed
    own = seed + _SEED_STRIDE * world_rank
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed += _SEED_STRIDE * world_rank
    elif hasattr(sampler, "generator"):
        sampler.generator = torch.Generator().manual_seed(own)
    elif sampler is None or isinstance(sampler, SequentialSampler):
        log.warning(
            "the trainer reads its dataset in order, so all peers train on the same samples; shuffle or "
            "split the dataset by world rank (this peer's is %d)",
            world_rank,
        )


def generation_period(args: TrainingArguments) -> int:
    """Optimizer steps after which a TRL trainer needs new rollouts; 1 for a trainer that generates nothing."""
    rollouts = _batches_per_generation(args)
    return rollouts // math.gcd(rollouts, args.gradient_accumulation_steps)


def check_divides(args: TrainingArguments, *, steps_per_epoch: int) -> None:
    """Raise UserError if an outer step would change the weights between two optimizer steps on the same rollouts."""
    period = generation_period(args)
    if steps_per_epoch % period:
        raise UserError(
            f"an outer step every {steps_per_epoch} inner steps would change the weights before all rollouts "
            f"of a generation have been trained on: one generation serves {period} inner steps "
            f"(steps_per_generation x num_iterations = {_batches_per_generation(args)} batches, "
            f"gradient_accumulation_steps {args.gradient_accumulation_steps}). Make --hv.local-steps divided by "
            f"--hv.num-fragments a multiple of {period}, say {-(-steps_per_epoch // period) * period}"
        )


def checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the trainer writes the checkpoint of the current step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _batches_per_generation(args: TrainingArguments) -> int:
    per_generation = getattr(args, "steps_per_generation", None)
    if per_generation is None:
        return args.gradient_accumulation_steps
    return int(per_generation) * int(getattr(args, "num_iterations", 1))


def _set_due(args: TrainingArguments, state: TrainerState, control: TrainerControl, before: int) -> None:
    """Log, evaluate and save where the nominal step has jumped over a multiple, which transformers tests with `%`."""

    def is_due(strategy: str, interval: int) -> bool:
        return strategy == "steps" and interval > 0 and state.global_step // interval > before // interval

    control.should_log |= is_due(args.logging_strategy, state.logging_steps)
    if args.eval_delay <= state.global_step:
        control.should_evaluate |= is_due(args.eval_strategy, state.eval_steps)
    control.should_save |= is_due(args.save_strategy, state.save_steps)


def _set_schedule(lr_scheduler: LRScheduler | None, step: int) -> None:
    """Set a scheduler to the state that it has after `step` steps, unless it depends on the loss."""
    # Unwrapped: accelerate's wrapper advances by one for every process.
    scheduler: Any = getattr(lr_scheduler, "scheduler", lr_scheduler)
    if isinstance(scheduler, ReduceLROnPlateau) or not hasattr(scheduler, "last_epoch"):
        return
    if scheduler.last_epoch > step:
        scheduler.last_epoch = -1
    with warnings.catch_warnings():
        # torch warns that the scheduler is stepped before its optimizer.
        warnings.simplefilter("ignore")
        while scheduler.last_epoch < step:
            scheduler.step()


def _last_loss(state: TrainerState) -> float | None:
    losses = (record["loss"] for record in reversed(state.log_history) if "loss" in record)
    return next(losses, None)
