"""Runs all jobs of a study, seed by seed, in parallel processes."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.convergence.run import run_job
from benchmarks.convergence.settings import Arm, Job, Optimizer, Scale
from benchmarks.convergence.store import Outcome, Store
from benchmarks.convergence.tuning import Rates, best, grid
from peers.system import PR_SET_PDEATHSIG

_RUNS_AT_ONCE = 8
"""Most jobs that one process runs side by side on a GPU. One process per core shares the GPU: a core needs five times
as long to launch a step's kernels as the GPU needs to run them, and as long again for averaging."""

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
        missing = [optimizer for optimizer in _optimizers(chosen) if optimizer not in rates]
        with _workers(self.processes) as pool:
            self.run([job for optimizer in missing for job in grid(self.scale, optimizer)], pool)
            rates = self.tuned(chosen, rates)
            self.say(f"rates: {rates}")
            # Seed by seed, so that an interrupted study has all arms for some seeds.
            self.run(
                [rates[arm.optimizer].job(self.scale, arm, s) for s in self.scale.seeds for arm in chosen],
                pool,
            )
        return rates

    def tuned(self, chosen: Sequence[Arm], rates: RatesOf) -> RatesOf:
        """The rates, with missing ones taken from finished tuning runs. Raises ValueError if some are unfinished."""
        for optimizer in _optimizers(chosen):
            if optimizer not in rates:
                jobs = grid(self.scale, optimizer)
                outcomes = self._known(jobs)
                if len(outcomes) < len(jobs):
                    raise ValueError(
                        f"{len(outcomes)} of {len(jobs)} runs that tune {optimizer} are finished"
                    )
                rates = {**rates, optimizer: best(self.scale, optimizer, jobs, [o.loss for o in outcomes])}
        return rates

    def outcomes(self, chosen: Sequence[Arm], rates: RatesOf) -> list[Outcome]:
        """The outcomes that exist, without running anything."""
        seeds = self.scale.seeds
        return self._known(
            [rates[arm.optimizer].job(self.scale, arm, seed) for arm in chosen for seed in seeds]
        )

    def tuning(self, chosen: Sequence[Arm]) -> list[Outcome]:
        """The outcomes of tuning that exist, for the optimizers of these arms."""
        return self._known([job for optimizer in _optimizers(chosen) for job in grid(self.scale, optimizer)])

    def run(self, jobs: Sequence[Job], pool: Executor) -> None:
        """Run the jobs that have no outcome yet."""
        store = Store(self.directory)
        missing = [job for job in jobs if store.outcome(job) is None]
        at_once = 1
        if self.scale.device == "cuda":
            at_once = max(1, min(_RUNS_AT_ONCE, math.ceil(len(missing) / self.processes)))
        futures = [
            pool.submit(_run, missing[first : first + at_once], self.directory)
            for first in range(0, len(missing), at_once)
        ]
        left = len(missing)
        for future in as_completed(futures):
            done = future.result()
            left, self._done = left - done, self._done + done
            self._tell(left)

    def _known(self, jobs: Sequence[Job]) -> list[Outcome]:
        store = Store(self.directory)
        return [outcome for job in jobs if (outcome := store.outcome(job)) is not None]

    def _tell(self, left: int) -> None:
        elapsed_s = time.monotonic() - self._started_at
        minutes = elapsed_s / self._done * left / 60
        self.say(f"{self._done} runs done; {left} of these to go, about {minutes:.0f} minutes")


def _optimizers(chosen: Sequence[Arm]) -> list[Optimizer]:
    return list(dict.fromkeys(arm.optimizer for arm in chosen))


def _run(jobs: Sequence[Job], directory: Path) -> int:
    """Run some jobs in this process; returns their number."""
    if jobs[0].scale.device == "cuda":
        from benchmarks.convergence.side_by_side import run_jobs

        run_jobs(jobs, directory)
    else:
        run_job(jobs[0], directory)
    return len(jobs)


def _workers(processes: int) -> ProcessPoolExecutor:
    """A pool of spawned processes that die with this one. A fork after torch has started threads might hang."""
    spawn = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    shares = spawn.SimpleQueue()
    for number in range(processes):
        shares.put(cores[number % len(cores) :: processes])
    return ProcessPoolExecutor(processes, spawn, initializer=_begin, initargs=(os.getpid(), shares))


def _begin(parent: int, shares: Any) -> None:
    """Begin a process of the pool, on cores of its own. The kernel kills it when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.sched_setaffinity(0, shares.get())
