"""GRPO with TRL's trainer, alone or as the worker of a peer. Start it with torchrun, by path or -m, or by itself."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

if not __package__:
    # Started by path: Python has put diloco/ first in sys.path, so its modules would shadow others of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from torch import Tensor
from transformers import PrinterCallback

from diloco.callback import DilocoCallback, check_divides, generation_period
from diloco.checkpoint.restore import refuse_to_begin_anew, skipped_event
from diloco.checkpoint.saver import check_saved
from diloco.data.sampling import PromptSchedule, place_of
from diloco.data.tokenizer import load_tokenizer
from diloco.errors import UserError
from diloco.launch.worker import Assignment, assigned, exit_code
from diloco.options.model_files import directory_of, has_weights, load_model_config
from diloco.options.trainer import TrainConfig, parse_train_config
from diloco.outer.diloco import Diloco
from diloco.outer.exchange import asked_daemon
from diloco.outer.world import World, on_every_rank, on_rank_zero, scattered
from diloco.process_end import exit_process
from diloco.rl.adapters import merged, trained, with_adapters
from diloco.rl.checkpoints import KeepCheckpoints, KeepDeltas
from diloco.rl.dialogues import judged_again
from diloco.rl.evaluation import means, measured
from diloco.rl.generator import generated
from diloco.rl.peer_rollouts import Group, PeerRollouts, Row, rows_of, terms_of
from diloco.rl.recorder import EvaluateWhenDue, Recorder
from diloco.rl.rollouts import Rollouts, opened_server
from diloco.rl.sampling import sampled
from diloco.rl.server_client import Sampling, Written
from diloco.rl.task_choice import open_task
from diloco.rl.tasks import Example
from diloco.rl.trainer import PeerTrainer, grpo_arguments, placeholders, reward_functions
from diloco.train.devices import split_gpus, starts_server, visible_gpus
from diloco.train.metrics import opened_metrics
from diloco.train.model import load_model
from diloco.train.optim import adamw, learning_rate
from diloco.train.progress import Progress
from diloco.train.run_dir import SCRATCH
from diloco.train.sharding import Precision, discard_partial_model, full_state, save_model
from diloco.train.signals import CleanUps, LeaveOnSignal
from peers.core.schedule import AS_LONG_AS_THE_ROUND
from peers.daemon.link import WorkerLink

T = TypeVar("T")
Found = TypeVar("Found")

LOGP_ALARMS = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Mean differences in nats between a server's log-probabilities and the trainer's that rounding does not explain."""
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def main() -> NoReturn:
    """Entry point of every rank."""
    signals = LeaveOnSignal()
    exit_process(exit_code(lambda: run(sys.argv[1:], signals.clean_ups)))


def run(argv: Sequence[str], clean_ups: CleanUps) -> None:
    """Train as the arguments say. Appends to `clean_ups` as `assigned` does."""
    config, named = parse_train_config(argv, "grpo")
    world = World.from_environment(os.environ)
    server_gpu = take_gpus(config, world, os.environ)
    device = world.device(config.device)
    with assigned(config, named, world, device, clean_ups) as (assignment, progress):
        training = Training(assignment, world, device, clean_ups, progress, server_gpu=server_gpu)
        with training.metrics:
            training.train()


class Training:
    """Trains on one rank."""

    def __init__(
        self,
        assignment: Assignment,
        world: World,
        device: torch.device,
        clean_ups: CleanUps,
        progress: Progress | None = None,
        *,
        server_gpu: str | None = None,
    ) -> None:
        """Load the model and the task, and start the inference server. Raises UserError."""
        config = assignment.config
        self.config, self.world, self.run_dir = config, world, assignment.run_dir
        self.progress = progress = progress or Progress(tells=False)
        asked = on_rank_zero(asked_daemon)
        self.world_rank = asked.world_rank
        self.end_step = config.end_step
        self.task = open_task(config.grpo, seed=config.seed)
        args = grpo_arguments(
            config,
            world,
            device,
            end_step=self.end_step,
            output_dir=self.run_dir / "trainer",
            seed=self.seed,
            reward_weights=[reward.weight for reward in self.task.rewards],
        )
        self.period = generation_period(args)
        check_divides(args, steps_per_epoch=config.hv.steps_per_epoch)
        check_reference(config)
        self.prompts = PromptSchedule(
            seed=config.seed,
            steps_per_epoch=config.hv.steps_per_epoch,
            batches_per_step=args.gradient_accumulation_steps,
            batches_per_generation=int(args.steps_per_generation or 0) * args.num_iterations,
            prompts_per_generation=int(args.generation_batch_size or 0) // config.grpo.num_generations,
        )
        num_held_out = min(config.grpo.eval_prompts, self.task.num_held_out)
        self.held_out = [self.task.held_out(index) for index in range(num_held_out)]
        self.tokenizer = load_tokenizer(config.path_model)
        seed_everything(self.seed + world.rank)
        with progress.phase("starting", "loading the model"):
            model = load_model(
                config.path_model,
                seed=config.seed,
                device=device,
                attn_implementation=config.attn_implementation,
            )
            self.model = with_adapters(model, config.grpo.lora_rank, seed=config.seed)
        self.metrics = opened_metrics(config, self.run_dir, world, on_trouble=progress.is_in_trouble)
        self.scratch, self.fetched = self.run_dir / SCRATCH, contextlib.ExitStack()
        clean_ups.append(self.fetched.close)
        self.skipped: list[str] = []
        self.kept = KeepCheckpoints(
            config.ckpt,
            lambda: self.outer,
            world,
            self.world_rank,
            scratch=self.scratch,
            finish_save=lambda: self.callback.finish_save(),
            on_event=self.record_checkpoint,
        )
        self.resume = self.kept.restore(
            self.fetched,
            self.skipped.append,
            needs_outer=asked.needs_outer,
            run_is_alive=asked.run_is_alive,
        )
        self.precision = Precision.of(config.precision, device)
        alarm = math.inf if config.grpo.rollout == "peers" else config.grpo.logp_alarm
        self.recorder = Recorder(
            self.metrics,
            epoch_of=lambda: self.outer.epoch,
            extra=self.rollout_figures,
            logp_alarm=LOGP_ALARMS[self.precision.compute] if alarm is None else alarm,
        )
        self.recorder.at_end = self.finish
        self.callback = DilocoCallback(
            local_steps=config.hv.local_steps,
            on_commit=lambda commit: self.recorder.committed(commit, self.outer.nominal_step),
            resume=self.resume.directory if self.resume else None,
            is_own=self.resume is None or self.resume.is_own,
        )
        clean_ups.append(self.discard_partial)
        self.server: Rollouts | None = None
        self.peer_rollouts: PeerRollouts | None = None
        self.pushed: tuple[int, str] | None = None
        """What `weights_of` was when weights were pushed last."""
        if config.grpo.rollout == "vllm":
            with progress.phase("starting", "the inference server"):
                self.open_server(clean_ups, server_gpu)
        self.trainer = self.built(args)
        if config.grpo.rollout == "peers":
            self.open_peer_rollouts(assignment.link_path, clean_ups)

    @property
    def seed(self) -> int:
        """Seed of this peer's completions: differs between peers, is kept by a restart, and is in NumPy's range."""
        return (self.config.seed + 1_000_003 * (self.world_rank or 0)) % 2**32

    @property
    def outer(self) -> Diloco:
        assert self.callback.outer is not None
        return self.callback.outer

    def built(self, args: Any) -> PeerTrainer:
        config = self.config
        optimizer = adamw(self.model, weight_decay=config.weight_decay)
        for group in optimizer.param_groups:
            group["lr"] = config.lr
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            partial(
                learning_rate, peak=1.0, warmup_steps=config.warmup_steps, total_steps=config.total_steps
            ),
        )
        trainer = PeerTrainer(
            rows=self.rows,
            is_sampled_elsewhere=config.grpo.rollout == "vllm",
            evaluation=self.evaluate,
            compared=self.compared if config.grpo.rollout == "peers" else None,
            model=self.model,
            args=args,
            reward_funcs=reward_functions(self.task),
            train_dataset=placeholders(self.prompts),
            processing_class=self.tokenizer,
            optimizers=(optimizer, schedule),
            callbacks=[
                self.recorder,
                self.callback,
                EvaluateWhenDue(
                    interval=config.eval_interval,
                    should_evaluate=self.evaluates_between,
                    at_start=self.start,
                ),
                self.kept,
                *self.deltas(),
            ],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def open_server(self, clean_ups: CleanUps, gpu: str | None) -> None:
        """Start the server on rank 0. A collective: if rank 0 fails, all ranks raise."""
        weights = self.whole_weights()

        def opened() -> None:
            self.server = opened_server(
                self.config,
                self.run_dir,
                weights.items(),
                self.tokenizer,
                dtype=self.precision.compute,
                gpu=gpu,
                environment=os.environ,
                on_event=partial(self.metrics.write, "event"),
            )
            clean_ups.append(self.server.close)

        on_rank_zero(opened)

    def open_peer_rollouts(self, link_path: Path | None, clean_ups: CleanUps) -> None:
        """On rank 0, connect to the daemon, whose queue rollouts come from. Raises UserError if there is no daemon."""
        if link_path is None:
            raise UserError(
                "--rollout peers needs a run that rollout peers can join: start this trainer by `diloco peer`"
            )
        if not self.world.is_main:
            return
        self.peer_rollouts = self.rollouts_by(WorkerLink.connect(link_path))
        clean_ups.append(self.peer_rollouts.close)

    def rollouts_by(self, link: WorkerLink) -> PeerRollouts:
        return PeerRollouts(
            link,
            self.run_dir / "policies",
            self.precision.compute,
            terms_of(self.config, self.task, self.model, self.prompts.prompts_per_generation),
            step_of=lambda: self.trainer.state.global_step,
            judge=partial(judged_again, self.task, self.tokenizer),
            on_event=partial(self.metrics.write, "event"),
        )

    def record_checkpoint(self, **event: Any) -> None:
        """Record the outcome of a save. Raises DilocoError if it failed and --ckpt.required is set."""
        self.metrics.write("event", **event)
        check_saved(event, is_required=self.config.ckpt.required)

    def deltas(self) -> list[KeepDeltas]:
        """The callback that writes delta checkpoints, if enabled. Writes config.json and the tokenizer beside them."""
        ckpt = self.config.ckpt
        if ckpt.delta_interval is None:
            return []
        directory = Path(ckpt.delta_path) if ckpt.delta_path else self.run_dir / "deltas"

        def describe() -> None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--ckpt.delta-path {directory} cannot be made: {error.strerror}.") from error
            content = json.dumps(load_model_config(self.config.path_model), indent=2, sort_keys=True)
            (directory / "config.json").write_text(content + "\n", encoding="utf-8")
            self.tokenizer.save_pretrained(directory)

        on_rank_zero(describe)
        return [KeepDeltas(directory, interval=ckpt.delta_interval, weights=self.whole_weights)]

    def train(self) -> None:
        """Train from this peer's position to the end of the run."""
        own = self.resume.directory if self.resume and self.resume.is_own else None
        try:
            self.trainer.train(resume_from_checkpoint=str(own) if own else None)
        finally:
            if self.server:
                self.server.close()
            if self.peer_rollouts:
                self.peer_rollouts.close()
            self.fetched.close()
            self.discard_scratch()
        self.metrics.write("event", event="finished", **self.position())

    def rows(self) -> list[Row]:
        """This rank's part of the next generation: prompts, each `num_generations` times in a row, with completions. A
        collective."""
        if self.pushed != self.weights_of:
            # Before waiting for rollout peers, whose next rollouts have to be sampled by these weights.
            self.push()
        numbers = self.example_numbers()
        groups = self.groups_of_peers() if self.config.grpo.rollout == "peers" else None
        if groups is None:
            groups = self.shared(self.own_groups, numbers)
            if self.peer_rollouts:
                self.peer_rollouts.generated(groups)

        def parts() -> list[list[Row]]:
            rows = rows_of(self.task, groups)
            each = len(rows) // self.world.num_ranks
            return [rows[rank * each : (rank + 1) * each] for rank in range(self.world.num_ranks)]

        return scattered(parts)

    def shared(self, work: Callable[[Sequence[T]], list[Found]], items: Sequence[T]) -> list[Found]:
        """What `work` finds for all items: for its share on each rank, or on rank 0 alone, which has the server. A
        collective."""
        if self.config.grpo.rollout == "vllm":
            return on_rank_zero(lambda: work(items))
        share = np.array_split(range(len(items)), self.world.num_ranks)[self.world.rank]
        return list(itertools.chain(*on_every_rank(lambda: work([items[index] for index in share]))))

    def push(self) -> None:
        """Give the newest weights to the server or to the rollout peers, if there are any. A collective."""
        takers = self.server or self.peer_rollouts

        def pushed() -> None:
            if takers:
                takers.publisher.take(self.taken_weights())
                takers.push()

        on_rank_zero(pushed)
        self.pushed = self.weights_of

    @property
    def weights_of(self) -> tuple[int, str]:
        """The step of the weights and the last commit's head: giving up a fork may change the head alone."""
        last = self.outer.last_commit
        return self.trainer.state.global_step, last.head if last else ""

    def taken_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The weights to push: rollout peers need only what is trained, the server whole weights without adapters."""
        if self.server:
            return merged(self.model, self.model.named_parameters())
        return trained(self.model).items()

    def whole_weights(self) -> dict[str, Tensor]:
        """The weights on the CPU, with adapters merged in; empty on ranks other than 0. A collective."""
        return dict(merged(self.model, full_state(self.model).items()))

    def groups_of_peers(self) -> list[Group] | None:
        """The rollouts of rollout peers, which only rank 0 gets. None if no such peer is there. A collective."""
        taken: list[Group] = []

        def have_come() -> bool | None:
            assert self.peer_rollouts is not None
            groups = self.peer_rollouts.take(self.prompts.prompts_per_generation)
            taken.extend(groups or ())
            return None if groups is None else bool(groups)

        with self.progress.phase("waiting", "for rollouts"):
            # In turns, since rollouts of a large model may take longer than a collective may.
            while (come := on_rank_zero(have_come)) is None:
                pass
        for figures in self.peer_rollouts.senders.values() if self.peer_rollouts else ():
            self.metrics.write("rollouts", step=self.trainer.state.global_step, **figures)
        return taken if come else None

    def compared(self, differences: Sequence[tuple[int, float]]) -> None:
        assert self.peer_rollouts is not None
        self.peer_rollouts.compared(differences)

    def own_groups(self, numbers: Sequence[int]) -> list[Group]:
        """Completions of these examples by this rank's model, or the server."""
        seed = self.rollout_seed()
        groups = generated(self.task, self.tokenizer, numbers, self.config.grpo, self.written, seed)
        return [
            Group(example=number, completions=group) for number, group in zip(numbers, groups, strict=True)
        ]

    def example_numbers(self) -> list[int]:
        """The numbers of the next generation's examples."""
        step, steps_per_epoch = self.trainer.state.global_step, self.prompts.steps_per_epoch
        block, local_step = place_of(
            self.outer,
            step,
            steps_per_epoch=steps_per_epoch,
            samples_per_block=self.prompts.prompts_per_block,
        )
        batch_of_step = self.trainer.batch_of_step
        return self.prompts.numbers(block, local_step, batch_of_step, num_examples=self.task.num_examples)

    def start(self) -> None:
        """Called after the swarm's weights have been loaded and before the first step."""
        hv = self.config.hv
        if self.period > 1 and (hv.local_time is not None or hv.overlap_steps == AS_LONG_AS_THE_ROUND):
            why = (
                "--hv.local-time may end an epoch after any inner step"
                if hv.local_time is not None
                else "--hv.overlap-steps auto may merge an average after any inner step"
            )
            raise UserError(
                f"{why}, but one generation of rollouts serves {self.period} of them; leave it out, or leave "
                "out --grpo.steps-per-generation and --grpo.num-iterations"
            )
        for problem in self.skipped:
            self.metrics.write("event", **skipped_event(problem))
        if self.resume is None:
            refuse_to_begin_anew(self.config.ckpt, self.trainer.state.global_step, self.skipped)
        self.metrics.write(
            "event",
            event="start",
            **self.position(),
            world_rank=self.outer.world_rank,
            micro_batch_size=self.trainer.args.per_device_train_batch_size,
        )
        if self.trainer.state.global_step == 0 and self.outer.evaluates and self.held_out:
            if self.config.grpo.rollout == "peers":
                # Rollout peers load it and begin to generate meanwhile.
                self.push()
            self.evaluate()

    def evaluates_between(self) -> bool:
        """Whether this peer runs an evaluation that is due now. At the end of the run, `finish` evaluates instead."""
        is_over = self.outer.done or self.trainer.state.global_step >= self.end_step
        return bool(self.held_out) and not is_over and self.outer.evaluates

    def evaluate(self) -> dict[str, float]:
        """Measure pass@k and the mean reward of the current weights on held-out prompts. A collective."""
        if self.config.grpo.rollout == "vllm":
            self.push()
        with self.progress.phase("evaluating"):
            figures = means(self.shared(self.measured, self.held_out))
        self.metrics.write("eval", **self.position(), **figures)
        return figures

    def measured(self, examples: Sequence[Example]) -> list[dict[str, float]]:
        """The figures of these held-out examples."""
        return measured(
            self.task,
            self.tokenizer,
            examples,
            self.written,
            samples=self.config.grpo.eval_samples,
            max_tokens=self.config.grpo.max_completion_length,
            seed=self.config.seed + self.trainer.state.global_step + 1_000_003 * self.world.rank,
        )

    def written(
        self, prompts: Sequence[list[int]], count: int, sampling: Sampling, seed: int
    ) -> list[Written]:
        """`count` completions of each prompt by the server, or the trainer's own model."""
        if self.server:
            return self.server.complete(prompts, count, sampling, seed=seed)
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        # Memory that suffices to train on so many completions suffices to generate them.
        at_once = self.config.per_device_train_batch_size
        # PEFT's `generate` calls the inner model's forward pass, and accelerate has wrapped only the outer one.
        with self.trainer.accelerator.autocast():
            return sampled(model, self.tokenizer, prompts, count, sampling, seed=seed, at_once=at_once)

    def rollout_seed(self) -> int:
        """The seed of the next generation on this rank; no other generation of a step, rank or peer has the same."""
        place = (self.seed, self.trainer.state.global_step, self.trainer.batch_of_step, self.world.rank)
        return random.Random(str(place)).getrandbits(31)

    def rollout_figures(self) -> dict[str, Any]:
        """Figures of the last rollouts, or of the last push of weights to the server, for the step's record."""
        if self.peer_rollouts:
            return self.peer_rollouts.figures()
        if not self.server or not self.server.last_push:
            return {}
        last = self.server.last_push
        return {
            "push_bytes": last["bytes"],
            "push_s": last["push_s"],
            "server_restarts": last["server_restarts"],
        }

    def finish(self) -> None:
        """After the last step, evaluate and save the model while this peer is still in the swarm."""
        self.recorder.write_commits()
        if self.outer.evaluates and self.held_out:
            self.evaluate()
        save_model(self.whole_weights(), self.run_dir, self.config.path_model, self.tokenizer)

    def position(self) -> dict[str, int]:
        return {"step": self.trainer.state.global_step, "epoch": self.outer.epoch}

    def discard_partial(self) -> None:
        """Remove half-written files. Called when a signal or an error ends the process."""
        self.discard_scratch()
        discard_partial_model(self.run_dir)

    def discard_scratch(self) -> None:
        """Remove the trainer's temporary checkpoints, and the weights for the server and rollout peers."""
        for name in ("trainer", "served", "policies"):
            shutil.rmtree(self.run_dir / name, ignore_errors=True)


def take_gpus(config: TrainConfig, world: World, environment: MutableMapping[str, str]) -> str | None:
    """Set CUDA_VISIBLE_DEVICES to the GPUs of this peer's ranks; must run before torch initializes CUDA.

    Returns the GPU of the inference server, if any. Raises UserError.
    """
    if world.num_ranks == 1:
        # With these variables accelerate would set up distributed training even for a single rank.
        for name in TORCHRUN:
            environment.pop(name, None)
    if config.device == "cpu":
        return None
    ranks, server = split_gpus(
        visible_gpus(environment),
        num_ranks=world.num_local_ranks,
        server=config.grpo.vllm_gpu,
        starts_server=starts_server(config),
    )
    if ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(ranks)
    return server


def check_reference(config: TrainConfig) -> None:
    """Raise UserError if TRL needs a reference model (--grpo.beta), but cannot load it: it does not know our seed."""
    if not config.grpo.beta or config.trains_adapters:
        return
    if not has_weights(directory_of(config.path_model, weights=True)):
        raise UserError(
            f"--grpo.beta {config.grpo.beta:g} keeps the model close to its initial weights, but {config.path_model} "
            "has no weights yet: leave --grpo.beta out, or name a trained model with --path-model"
        )


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch, since rewards and rollouts may use any of them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


if __name__ == "__main__":
    main()
