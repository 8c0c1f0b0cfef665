"""Runs all jobs of a study, seed by seed, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.convergence.run import run_job
from benchmarks.convergence.settings import (
    DATA_PARALLEL,
    DATA_PARALLEL_MUON,
    FP32,
    MUON,
    Arm,
    Job,
    Optimizer,
    Scale,
    arms,
)
from benchmarks.convergence.store import Outcome, Store
from benchmarks.convergence.tuning import best_rate, by_factors, by_steps
from peers.daemon.supervisor import die_with_parent


@dataclass(frozen=True)
class Rates:
    """Learning rates of one optimizer, tuned on one seed: the inner rate of data parallel, and the inner and outer rate
    of DiLoCo in fp32, which all arms with averaging use."""

    data_parallel: float
    inner: float
    outer: float

    def job(self, scale: Scale, arm: Arm, seed: int) -> Job:
        inner = self.inner if arm.averages else self.data_parallel
        outer = self.outer if arm.outer_lr is None else arm.outer_lr
        return Job(scale=scale, arm=arm, seed=seed, inner_lr=inner, outer_lr=outer if arm.averages else 0.0)


RatesOf = dict[Optimizer, Rates]


@dataclass
class Study:
    """Runs the jobs that have no result yet, and prints its progress."""

    scale: Scale
    directory: Path
    processes: int
    say: Callable[[str], None] = print
    _started_at: float = field(default_factory=time.monotonic)
    _done: int = 0
    """Number of runs completed by this process."""

    def complete(self, chosen: Sequence[Arm], rates: RatesOf) -> RatesOf:
        """Run all missing jobs, after tuning optimizers without rates. Returns the rates."""
        with _workers(self.processes) as pool:
            for optimizer in dict.fromkeys(arm.optimizer for arm in chosen):
                rates = rates if optimizer in rates else {**rates, optimizer: self.tuned(optimizer, pool)}
            self.say(f"rates: {rates}")
            # Seed by seed, so that an interrupted study has all arms for some seeds.
            jobs = [rates[arm.optimizer].job(self.scale, arm, s) for s in self.scale.seeds for arm in chosen]
            self.run(jobs, pool)
        return rates

    def outcomes(self, chosen: Sequence[Arm], rates: RatesOf) -> list[Outcome]:
        """The outcomes that exist, without running anything."""
        store, seeds = Store(self.directory), self.scale.seeds
        jobs = [rates[arm.optimizer].job(self.scale, arm, seed) for arm in chosen for seed in seeds]
        return [outcome for job in jobs if (outcome := store.outcome(job)) is not None]

    def tuned(self, optimizer: Optimizer, pool: Executor) -> Rates:
        """Search for the best rates. Finished runs are reused."""
        scale, known = self.scale, arms(self.scale)

        def losses(arm: Arm, rates: Sequence[tuple[float, float]]) -> list[float]:
            jobs = [
                Job(scale=scale, arm=arm, seed=scale.tuning_seed, inner_lr=inner, outer_lr=outer)
                for inner, outer in rates
            ]
            return [outcome.loss for outcome in self.run(jobs, pool)]

        plain, fp32, start = known[DATA_PARALLEL], known[FP32], scale.inner_lr
        if optimizer == "muon":
            plain, fp32, start = known[DATA_PARALLEL_MUON], known[MUON], scale.muon_lr
        self.say(
            f"tuning {optimizer}: data parallel's rate, then DiLoCo's inner and outer one, about 10 runs"
        )
        data_parallel = best_rate(start, by_factors, lambda rates: losses(plain, [(r, 0.0) for r in rates]))
        inner = best_rate(
            data_parallel, by_factors, lambda rates: losses(fp32, [(r, scale.outer_lr) for r in rates])
        )
        outer = best_rate(scale.outer_lr, by_steps, lambda rates: losses(fp32, [(inner, r) for r in rates]))
        return Rates(data_parallel, inner, outer)

    def run(self, jobs: Sequence[Job], pool: Executor) -> list[Outcome]:
        """Run the jobs and return their outcomes, in order."""
        store = Store(self.directory)
        missing = [job for job in jobs if store.outcome(job) is None]
        futures = [pool.submit(run_job, job, self.directory) for job in missing]
        for number, future in enumerate(as_completed(futures), start=1):
            future.result()
            self._done += 1
            self._tell(len(missing) - number)
        outcomes = [store.outcome(job) for job in jobs]
        return [outcome for outcome in outcomes if outcome is not None]

    def _tell(self, left: int) -> None:
        elapsed_s = time.monotonic() - self._started_at
        minutes = elapsed_s / self._done * left / 60
        self.say(f"{self._done} runs done; {left} of these to go, about {minutes:.0f} minutes")


def _workers(processes: int) -> ProcessPoolExecutor:
    """A pool of spawned processes that die with this one. A fork after torch has started threads might hang."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, spawn, initializer=die_with_parent, initargs=(os.getpid(),))
