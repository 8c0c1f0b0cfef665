"""Runs one job from its beginning, or from where it was interrupted, to its result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from benchmarks.convergence.averaging import AveragedSwarm
from benchmarks.convergence.settings import Job
from benchmarks.convergence.store import Outcome, Store, Swarm
from benchmarks.convergence.swarm import DataParallel, LocalSwarm, new_replica
from diloco.data.batches import SampleSource, open_data
from diloco.data.held_out import Validation
from diloco.data.tokenizer import load_tokenizer
from diloco.outer.world import World
from diloco.train.evaluation import evaluate

SAVE_INTERVAL_S = 60.0
EVAL_BATCH = 32

Say = Callable[[str], None]


def run_job(job: Job, directory: Path, say: Say = print) -> Outcome:
    """Run a job, or return its outcome if it has finished before. If it is killed, the next call resumes it."""
    store = Store(directory)
    if (known := store.outcome(job)) is not None:
        return known
    if job.scale.device == "cpu":
        torch.set_num_threads(1)
    outcome = _Run(job, store, say).run_to_end()
    store.finish(job, outcome)
    return outcome


class _Run:
    def __init__(self, job: Job, store: Store, say: Say) -> None:
        self._job, self._store, self._say = job, store, say
        config = job.scale.train_config(job.seed)
        source: SampleSource = open_data(config, load_tokenizer(config.path_model))
        self._validation = source.validation()
        self._curve_validation = curve_validation(self._validation, job.scale.curve_tokens)
        self._swarm: Swarm = LocalSwarm(job, source) if job.arm.averages else DataParallel(job, source)
        self._evaluated = new_replica(job, num_fragments=job.arm.num_fragments)
        self._curve: list[tuple[int, float]] = []
        self._cpu_s = 0.0
        progress = store.restore(job, self._swarm)
        if progress is not None:
            self._curve = [(tokens, loss) for tokens, loss in progress["curve"]]
            self._cpu_s = progress["cpu_s"]

    def run_to_end(self) -> Outcome:
        job, swarm = self._job, self._swarm
        began_at, saved_at = time.process_time() - self._cpu_s, time.monotonic()
        while swarm.num_steps < job.scale.total_steps:
            swarm.step()
            if swarm.num_steps % job.scale.eval_interval == 0 and swarm.num_steps < job.scale.total_steps:
                self._record_point()
            if swarm.at_rest and time.monotonic() - saved_at > SAVE_INTERVAL_S:
                progress = {"curve": self._curve, "cpu_s": time.process_time() - began_at}
                self._store.save(job, swarm, progress)
                saved_at = time.monotonic()
        loss = self._loss(self._validation)
        self._curve.append((job.scale.tokens, self._loss(self._curve_validation)))
        self._say(f"{self._title()}: {loss:.4f} nats a byte")
        averaged = swarm if isinstance(swarm, AveragedSwarm) else None
        return outcome_of(job, averaged, loss, self._curve, time.process_time() - began_at)

    def _record_point(self) -> None:
        loss = self._loss(self._curve_validation)
        done = self._swarm.num_steps / self._job.scale.total_steps
        self._curve.append((round(done * self._job.scale.tokens), loss))
        self._say(f"{self._title()}: {done:4.0%}, {loss:.4f}")

    def _loss(self, validation: Validation) -> float:
        self._swarm.write_anchor(self._evaluated)
        inner = self._evaluated.inner
        return evaluate(inner, validation, world=World(), micro_batch_size=EVAL_BATCH).loss

    def _title(self) -> str:
        job = self._job
        rates = f"lr {job.inner_lr:g}" + (f", outer {job.outer_lr:g}" if job.arm.averages else "")
        return f"{job.arm.name}, seed {job.seed}, {rates}"


def curve_validation(validation: Validation, max_tokens: int) -> Validation:
    """The windows for points of the curve, spread evenly over the held-out text."""
    windows = validation.windows
    count = max(1, min(len(windows), max_tokens // (windows.shape[1] - 1)))
    return replace(validation, windows=windows[np.arange(count) * len(windows) // count])


def outcome_of(
    job: Job, swarm: AveragedSwarm | None, loss: float, curve: list[tuple[int, float]], cpu_s: float
) -> Outcome:
    """The outcome of a finished run. `swarm` None: the run is data parallel."""
    return Outcome(
        arm=job.arm.name,
        seed=job.seed,
        inner_lr=job.inner_lr,
        outer_lr=job.outer_lr,
        outer_momentum=job.outer_momentum,
        loss=loss,
        curve=curve,
        sent_bytes=swarm.sent_bytes if swarm is not None else 0,
        visible_share=fmean(swarm.visible_shares) if swarm is not None else 1.0,
        cpu_s=cpu_s,
    )
