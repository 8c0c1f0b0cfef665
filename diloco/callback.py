"""A transformers Trainer, or one of TRL's, as a peer's worker.

trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[DilocoCallback()])
trainer.train()

The outer step takes place in `on_step_end`: after the optimizer's step, and before logging, evaluation, saving and
TRL's next push of weights to an inference server. What is averaged are the parameters that require a gradient: all of
a model, or the adapters of one under PEFT. Without a daemon (no DILOCO_LINK in the environment) nothing changes.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.checkpoint.mark import COMPLETE, checked_mark, mark_whole
from diloco.checkpoint.restore import others_state
from diloco.errors import DilocoError, UserError
from diloco.outer.diloco import Commit, Diloco, Restored
from diloco.outer.world import barrier, on_rank_zero

log = logging.getLogger(__name__)

# A sampler counts its own on by one each pass.
_SEEDS_BETWEEN_PEERS = 1_000_003


class DilocoCallback(TrainerCallback):
    """Give it to one trainer. `outer` is there from `on_train_begin` on.

    The weights to begin with are the swarm's, whatever the trainer was given, unless the swarm goes on from this
    peer's own checkpoint. `state.global_step` and the learning rate follow the run's nominal steps, so that a peer
    that joins late stands where the others do. A checkpoint of the trainer (`checkpoint-<N>`) gets the swarm's state
    beside the model; `trainer.train(resume_from_checkpoint=...)` then goes on bit for bit. What TRL has generated is
    not saved, so where one generation serves several steps, save when none is under way (`generation_period`).
    """

    def __init__(
        self,
        *,
        local_steps: int | None = None,
        on_commit: Callable[[Commit], None] | None = None,
        resume: Path | None = None,
        is_own: bool = True,
    ) -> None:
        """`local_steps` (H) is the swarm's where it is not given; `on_commit` is called after every outer step.

        `resume` is the checkpoint that `train(resume_from_checkpoint=...)` is given; without it, the one named in the
        arguments, else `checkpoint-<N>` in the output directory. One that is not this peer's own is of use for the
        swarm's state in it, and the trainer is given none.
        """
        self.outer: Diloco | None = None
        self._local_steps = local_steps
        self._on_commit = on_commit
        self._resume, self._is_own = resume, is_own
        self._tokens_seen = 0
        self._owes_checkpoint = False

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
        """Wait for the swarm, and begin with its weights. Raises UserError where its schedule does not fit TRL's.

        Samples are shuffled otherwise by every peer: the same seed would have all of them train on the same.
        """
        assert model is not None
        self.outer = Diloco(
            model,
            local_steps=self._local_steps,
            max_steps=state.max_steps if state.max_steps > 0 else None,
            restore=partial(self._restore, args, state),
            # Rollouts are trained on with log-probabilities of the weights that made them.
            goes_ahead=generation_period(args) == 1,
        )
        self._tokens_seen = state.num_input_tokens_seen
        if self.outer.active:
            check_divides(args, steps_per_epoch=self.outer.steps_per_epoch)
            self._stand_where_the_swarm_does(state, lr_scheduler)
            if train_dataloader is not None:
                shuffle_by_world_rank(train_dataloader, args, self.outer.world_rank or 0)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LRScheduler | None = None,
        **kwargs: Any,
    ) -> None:
        """Count the step; at an epoch's end, average. Raises as Diloco.step does."""
        outer = self._joined
        if not outer.active:
            return
        outer.step(num_tokens=self._new_tokens(args, state), loss=_last_loss(state))
        self._tell_commits(outer)
        reached_end = state.global_step >= state.max_steps
        self._stand_where_the_swarm_does(state, lr_scheduler)
        if outer.done:
            control.should_training_stop = True
        elif reached_end and state.global_step < state.max_steps:
            # A fork was given up: the swarm's weights are from before the end.
            control.should_training_stop = False
        self._save_between_flights(outer, control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the swarm's state to the checkpoint that the trainer has just written. Where it cannot be, it is said."""
        outer, directory = self._joined, checkpoint_of(args, state)
        if not outer.active or outer.in_flight:
            return
        # Each rank writes files of its own.
        barrier()
        try:
            if on_rank_zero(directory.is_dir):
                outer.checkpoint(directory)
                on_rank_zero(lambda: mark_whole(directory, outer, num_ranks=args.world_size))
        except (DilocoError, OSError) as error:
            log.error("%s has nothing of the swarm in it, and cannot be resumed from: %s", directory, error)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average what is left of the epoch, and leave the swarm."""
        outer = self._joined
        outer.finish()
        self._tell_commits(outer)

    @property
    def _joined(self) -> Diloco:
        if self.outer is None:
            raise UserError(
                "DilocoCallback was added after training had begun; give it to the Trainer before"
            )
        return self.outer

    def _tell_commits(self, outer: Diloco) -> None:
        for commit in outer.commits:
            if self._on_commit:
                self._on_commit(commit)

    def _restore(
        self, args: TrainingArguments, state: TrainerState, world_rank: int | None
    ) -> Restored | None:
        """Weights and optimizer were restored by the trainer; here is what it knows nothing of."""
        if world_rank is None:
            return None
        if self._resume is not None and not self._is_own:
            return others_state(on_rank_zero(partial(checked_mark, self._resume)), self._resume)
        if state.global_step == 0:
            return None
        named = self._resume or args.resume_from_checkpoint or checkpoint_of(args, state)
        directory = Path(str(named))
        if not (directory / COMPLETE).is_file():
            return None
        mark = on_rank_zero(lambda: checked_mark(directory))
        if mark.num_ranks != args.world_size:
            raise UserError(
                f"{directory} was saved by {mark.num_ranks} ranks and this peer has {args.world_size}; start as many"
            )
        return Restored(position=mark.position, tokens=mark.tokens, directory=directory)

    def _new_tokens(self, args: TrainingArguments, state: TrainerState) -> int:
        """This rank's tokens since the last step, by the trainer's count; samples where it counts none."""
        if not state.num_input_tokens_seen:
            return args.per_device_train_batch_size * args.gradient_accumulation_steps
        new, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
        return int(new) // args.world_size

    def _stand_where_the_swarm_does(self, state: TrainerState, lr_scheduler: LRScheduler | None) -> None:
        assert self.outer is not None
        if state.global_step != self.outer.nominal_step:
            state.global_step = self.outer.nominal_step
            _set_schedule(lr_scheduler, state.global_step)

    def _save_between_flights(self, outer: Diloco, control: TrainerControl) -> None:
        """While weights are on their way, a checkpoint would hold half of an outer step: it waits for their return."""
        if outer.in_flight:
            self._owes_checkpoint |= control.should_save
            control.should_save = False
        elif self._owes_checkpoint:
            control.should_save, self._owes_checkpoint = True, False


def shuffle_by_world_rank(dataloader: Any, args: TrainingArguments, world_rank: int) -> None:
    """Give a trainer's sampler a seed of the peer's own, or say that it has none."""
    sampler = get_sampler(dataloader)
    seed = args.seed if args.data_seed is None else args.data_seed
    own = seed + _SEEDS_BETWEEN_PEERS * world_rank
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed += _SEEDS_BETWEEN_PEERS * world_rank
    elif hasattr(sampler, "generator"):
        sampler.generator = torch.Generator().manual_seed(own)
    elif sampler is None or isinstance(sampler, SequentialSampler):
        log.warning(
            "the trainer reads its data in their order, so that all peers train on the same: give it a dataset that is "
            "shuffled or split by the world rank, here %d",
            world_rank,
        )


def generation_period(args: TrainingArguments) -> int:
    """Optimizer steps that one generation of a TRL trainer serves; 1 for a trainer that generates nothing."""
    rollouts = _batches_per_generation(args)
    return rollouts // math.gcd(rollouts, args.gradient_accumulation_steps)


def check_divides(args: TrainingArguments, *, steps_per_epoch: int) -> None:
    """Raise UserError where averaging would leave TRL with rollouts that older weights have scored."""
    period = generation_period(args)
    if steps_per_epoch % period:
        raise UserError(
            f"an outer step every {steps_per_epoch} inner steps would meet rollouts of which some are still to be "
            f"trained on, with log-probabilities of the weights before it: one generation serves {period} inner steps "
            f"(steps_per_generation x num_iterations = {_batches_per_generation(args)} batches, "
            f"gradient_accumulation_steps {args.gradient_accumulation_steps}). Make --hv.local-steps divided by "
            f"--hv.num-fragments a multiple of {period}, say {-(-steps_per_epoch // period) * period}"
        )


def checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the trainer writes its checkpoint of this step."""
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _batches_per_generation(args: TrainingArguments) -> int:
    per_generation = getattr(args, "steps_per_generation", None)
    if per_generation is None:
        return args.gradient_accumulation_steps
    return int(per_generation) * int(getattr(args, "num_iterations", 1))


def _set_schedule(lr_scheduler: LRScheduler | None, step: int) -> None:
    """Put a scheduler where so many steps would have put it."""
    # accelerate's wrapper would count each step once for every process.
    scheduler: Any = getattr(lr_scheduler, "scheduler", lr_scheduler)
    if scheduler is None or not hasattr(scheduler, "last_epoch"):
        return
    if scheduler.last_epoch > step:
        scheduler.last_epoch = -1
    with warnings.catch_warnings():
        # torch takes it for a scheduler stepped before its optimizer.
        warnings.simplefilter("ignore")
        while scheduler.last_epoch < step:
            scheduler.step()


def _last_loss(state: TrainerState) -> float | None:
    losses = (record["loss"] for record in reversed(state.log_history) if "loss" in record)
    return next(losses, None)
