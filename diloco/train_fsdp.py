"""Pretraining with FSDP2, alone or as the worker of a peer. Start it with torchrun, by path or -m, or by itself."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

if not __package__:
    # Started by path: Python has put diloco/ first in sys.path, so its modules would shadow others of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from torch import Tensor

from diloco.checkpoint.checkpoint import Checkpoints
from diloco.checkpoint.saver import check_saved
from diloco.data.batches import Prefetched, batches, open_data
from diloco.data.sampling import Block, place_of
from diloco.data.streaming import NUM_LANES, StreamingSource
from diloco.data.tokenizer import load_tokenizer
from diloco.launch.worker import Assignment, assigned, exit_code
from diloco.options.model_files import load_model_config, model_files
from diloco.options.trainer import TrainConfig, parse_train_config
from diloco.outer.diloco import Diloco
from diloco.outer.world import World, device_mesh, of_first_of_node, on_rank_zero
from diloco.process_end import exit_process
from diloco.train.evaluation import evaluate, seconds_to_evaluate
from diloco.train.inner import InnerLoop
from diloco.train.memory import check_memory, memory_needed_bytes
from diloco.train.metrics import opened_metrics
from diloco.train.metrics_file import line_of
from diloco.train.model import load_model, num_parameters
from diloco.train.node_stream import read_for_node
from diloco.train.optim import learning_rate, optimizer_of
from diloco.train.progress import Progress
from diloco.train.run_dir import SCRATCH
from diloco.train.sharding import Precision, compiles, discard_partial_model, full_state, prepare, save_model
from diloco.train.signals import CleanUps, LeaveOnSignal

LONGEST_FIRST_EVALUATION_S = 60.0
STREAM_FILE = "stream.json"


def main() -> NoReturn:
    """Entry point of every rank."""
    signals = LeaveOnSignal()
    exit_process(exit_code(lambda: run(sys.argv[1:], signals.clean_ups)))


def run(argv: Sequence[str], clean_ups: CleanUps) -> None:
    """Train as the arguments say. Appends to `clean_ups` as `assigned` does."""
    config, named = parse_train_config(argv)
    world = World.from_environment(os.environ)
    device = world.device(config.device)
    with assigned(config, named, world, device, clean_ups) as (assignment, progress):
        trainer = Trainer(assignment, world, device, clean_ups, progress)
        with trainer.metrics:
            trainer.train()


class Trainer:
    """Trains on one rank."""

    def __init__(
        self,
        assignment: Assignment,
        world: World,
        device: torch.device,
        clean_ups: CleanUps,
        progress: Progress | None = None,
    ) -> None:
        """Load model and data, and wait for the swarm. Raises UserError, and peers.errors.UserError."""
        config = assignment.config
        self.config, self.world, self.run_dir = config, world, assignment.run_dir
        self.progress = progress = progress or Progress(tells=False)
        self.end_step = config.end_step
        self.tokens_per_step = config.total_batch_size * config.seq_length
        check_fits(config, world, device)
        with progress.phase("starting", "loading the tokenizer"):
            self.tokenizer = load_tokenizer(config.path_model)
        with progress.phase("tokenizing", config.dataset_name_or_path, unit="bytes") as tokenized:
            self.source = open_data(
                config,
                self.tokenizer,
                on_tokenized=tokenized,
                # The first rank of a node, since rank 0 reports the progress.
                fills_cache=world.is_first_of_node,
                agreed=lambda key: of_first_of_node(world, key),
            )
            self.validation = self.source.validation()
        self.metrics = opened_metrics(config, self.run_dir, world, on_trouble=progress.is_in_trouble)
        torch.manual_seed(config.seed + world.rank)
        precision = Precision.of(config.precision, device)
        mesh = device_mesh(world, device, config.sharding_strategy) if world.num_ranks > 1 else None
        with progress.phase("starting", "loading the model"):
            model = load_model(
                config.path_model,
                seed=config.seed,
                device="cpu" if mesh else device,
                attn_implementation=config.attn_implementation,
            )
            prepare(model, config, precision=precision, device=device, mesh=mesh)
        self.is_compiled = not compiles(config, device)
        """False until the first step if that step runs torch.compile, which takes long."""
        self.inner = InnerLoop(
            model,
            optimizer_of(config.optimizer, model, weight_decay=config.weight_decay),
            precision=precision,
            device=device,
            micro_batch_size=config.per_device_train_batch_size,
            max_grad_norm=config.max_grad_norm,
        )
        self.checkpoints = Checkpoints(
            config.ckpt,
            world,
            self.inner,
            scratch=self.run_dir / SCRATCH,
            beside=model_files(load_model_config(config.path_model), self.tokenizer),
        )
        clean_ups.append(self.discard_partial)
        self.outer = Diloco(
            model,
            local_steps=config.hv.local_steps,
            max_steps=self.end_step,
            restore=self.checkpoints.restore,
            on_waiting=progress.waits_for,
        )
        self.record_checkpoints()
        self.reading: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if isinstance(self.source, StreamingSource):
            self.reading = read_for_node(self.source, world)
            block, local_step = self.place()
            state = self.checkpoints.restored_file(STREAM_FILE)
            self.source.begin(block, local_step * config.total_batch_size, state)
        self.checkpoints.begin(self.outer.nominal_step)

    def train(self) -> None:
        """Train from this peer's position to the end of the run, and save the model."""
        outer = self.outer
        self.metrics.write(
            "event",
            event="start",
            **self.position(),
            world_rank=outer.world_rank,
            micro_batch_size=self.inner.micro_batch_size,
        )
        if isinstance(self.source, StreamingSource) and self.source.num_files < NUM_LANES:
            self.metrics.write(
                "event", event="few_files", num_files=self.source.num_files, num_parts=NUM_LANES
            )
        if outer.nominal_step == 0 and outer.evaluates:
            self.evaluate_before_training()
        with self.reading:
            while not outer.done:
                with self.samples_left() as samples_of_steps:
                    for samples in samples_of_steps:
                        if self.step(torch.from_numpy(samples)) or outer.done:
                            break
        if outer.evaluates:
            self.evaluate()
        with self.progress.phase("saving", "the model and the last checkpoint"):
            save_model(full_state(self.inner.model), self.run_dir, self.config.path_model, self.tokenizer)
            self.checkpoints.close()
        self.record_checkpoints()
        outer.finish()
        self.metrics.write("event", event="finished", **self.position())

    def step(self, samples: Tensor) -> bool:
        """One inner step, then whatever is due: outer step, evaluation, checkpoint. Returns whether an epoch ended."""
        outer, config, metrics = self.outer, self.config, self.metrics
        started_at, step = time.perf_counter(), outer.nominal_step
        if config.log_activations_steps and step % config.log_activations_steps == 0:
            metrics.write("activations", step=step, rms=self.inner.activation_norms(samples))
        lr = learning_rate(
            step, peak=config.lr, warmup_steps=config.warmup_steps, total_steps=config.total_steps
        )
        with (
            contextlib.nullcontext()
            if self.is_compiled
            else self.progress.phase("compiling", "the first step"),
            self.progress.step(step + 1, self.tell_of_long_steps) as reached,
        ):
            result = self.inner.step(samples, lr=lr, on_micro_batch=reached)
        self.is_compiled = True
        rate = self.tokens_per_step / (time.perf_counter() - started_at)
        tokens = (step + 1) * self.tokens_per_step
        figures = {"step": step + 1, "epoch": outer.epoch, "lr": lr, "tokens": tokens, "tokens_per_s": rate}
        metrics.write("step", **figures, **asdict(result))

        # A checkpoint may be overdue since an earlier step, because rounds were in flight.
        is_save_due = self.checkpoints.due(step)
        outer.step(num_tokens=samples.shape[0] * config.seq_length, loss=result.loss, is_save_due=is_save_due)
        for commit in outer.commits:
            metrics.write("epoch", step=outer.nominal_step, **asdict(commit))
        before, step = step, outer.nominal_step
        # `step % eval_interval == 0` could miss an evaluation: an outer step may advance the nominal step by several.
        is_due = config.eval_interval and step // config.eval_interval > before // config.eval_interval
        if is_due and not outer.done and outer.evaluates:
            self.evaluate()
        if self.checkpoints.due(step) and not outer.in_flight:
            with self.progress.phase("saving", f"a checkpoint of step {step}"):
                self.checkpoints.save(outer, step=step, beside=self.stream_state())
        self.record_checkpoints()
        return bool(outer.commits)

    def tell_of_long_steps(self, step_s: float) -> None:
        """Record how long a step will take, while the first long one is under way."""
        self.metrics.write(
            "event", event="long_steps", **self.position(), step_s=step_s, step_tokens=self.tokens_per_step
        )

    def samples_left(self) -> Prefetched[np.ndarray]:
        """This rank's samples, int64 [n, seq_length + 1], for each remaining step of the epoch."""
        block, local_step = self.place()
        return Prefetched(
            batches(
                self.source,
                block,
                local_steps=range(local_step, self.config.hv.steps_per_epoch),
                total_batch_size=self.config.total_batch_size,
                rank=self.world.rank,
                num_ranks=self.world.num_ranks,
            )
        )

    def place(self) -> tuple[Block, int]:
        """The block of the next step's samples, and the local step in it."""
        steps = self.config.hv.steps_per_epoch
        return place_of(
            self.outer,
            self.outer.nominal_step,
            steps_per_epoch=steps,
            samples_per_block=self.source.samples_per_block,
        )

    def stream_state(self) -> dict[str, bytes]:
        """The file of a checkpoint with the position in a streamed dataset; other data needs none."""
        if not isinstance(self.source, StreamingSource):
            return {}
        block, local_step = self.place()
        return {STREAM_FILE: self.source.state(block, local_step * self.config.total_batch_size)}

    def evaluate_before_training(self) -> None:
        """Evaluate, unless that would keep a slow machine from its first step for minutes."""
        with self.progress.phase("evaluating", "before training"):
            seconds = seconds_to_evaluate(
                self.inner, self.validation, world=self.world, micro_batch_size=self.inner.micro_batch_size
            )
        if seconds <= LONGEST_FIRST_EVALUATION_S:
            self.evaluate()
        else:
            self.metrics.write("event", event="no_first_evaluation", **self.position(), seconds=seconds)

    def evaluate(self) -> None:
        """Evaluate the weights on the held-out text and record the result."""
        when = "" if self.outer.nominal_step else "before training"
        num_windows = len(self.validation.windows)
        with self.progress.phase("evaluating", when, total=num_windows, unit="windows") as reached:
            result = evaluate(
                self.inner,
                self.validation,
                world=self.world,
                micro_batch_size=self.inner.micro_batch_size,
                on_scored=reached,
            )
        self.progress.evaluated(self.outer.nominal_step, result.loss)
        self.metrics.write(
            "eval",
            **self.position(),
            **asdict(result),
            unigram_bits_per_byte=self.validation.byte_frequency_bits,
            eval_bytes=self.validation.num_bytes,
        )

    def record_checkpoints(self) -> None:
        """Record which checkpoints have been written, failed or were skipped since the last call."""
        for event in self.checkpoints.events():
            self.metrics.write("event", **event)
            if event["event"] in ("checkpoint", "checkpoint_failed"):
                text = line_of({"kind": "event", **event}) if event["event"] == "checkpoint_failed" else ""
                self.progress.is_in_trouble("checkpoint", text or "")
            # It is enough that one rank raises: torchrun, or the daemon, then ends the others.
            check_saved(event, is_required=self.config.ckpt.required and self.world.is_main)

    def position(self) -> dict[str, int]:
        step = self.outer.nominal_step
        return {"step": step, "epoch": self.outer.epoch, "tokens": step * self.tokens_per_step}

    def discard_partial(self) -> None:
        """Remove half-written files. Called when a signal or an error ends the process."""
        self.checkpoints.discard_partial()
        discard_partial_model(self.run_dir)


def check_fits(config: TrainConfig, world: World, device: torch.device) -> None:
    """Raise UserError if this machine has too little memory to train the model."""
    model_config = load_model_config(config.path_model)
    need = memory_needed_bytes(
        num_parameters(model_config),
        activation_tokens=config.per_device_train_batch_size * config.seq_length * world.num_local_ranks,
        config=model_config,
        optimizer=config.optimizer,
        on_gpu=device.type == "cuda",
        recomputes=config.activation_checkpointing,
        copies_state=config.copies_state,
        # If this worker was restarted, its daemon has already allocated its share of the memory.
        in_swarm=False,
        num_copies=None if config.shards_model else world.num_local_ranks,
    )
    gpu_bytes = torch.cuda.mem_get_info(device)[0] * world.num_local_ranks if device.type == "cuda" else None
    # Rank 0 checks while no rank has allocated memory yet.
    on_rank_zero(lambda: check_memory(need, path_model=config.path_model, device_available=gpu_bytes))


if __name__ == "__main__":
    main()
