"""The learning rates that a study tries before it compares anything: the same grid for every optimizer, on one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

_FACTORS = (0.5, 2**-0.5, 1.0, 2**0.5, 2.0)
"""Data parallel's rates, relative to the start value of tuning."""
_LOCAL_FACTORS = (0.5, 2**-0.5, 1.0, 2**0.5)
"""DiLoCo's inner rates are lower: its workers train on smaller batches."""
_OUTER = ((0.4, 0.6), (0.7, 0.6), (1.0, 0.6), (0.4, 0.8), (0.7, 0.8))
"""Outer rates with momenta, around those of arXiv 2503.09799 and 2505.23725 for four peers."""


@dataclass(frozen=True)
class Rates:
    """Learning rates of one optimizer, tuned on one seed: the inner rate of data parallel, and those of DiLoCo in fp32,
    which all arms with averaging use."""

    data_parallel: float
    inner: float
    outer: float
    momentum: float

    def job(self, scale: Scale, arm: Arm, seed: int) -> Job:
        if not arm.averages:
            return Job(scale=scale, arm=arm, seed=seed, inner_lr=self.data_parallel, outer_lr=0.0)
        outer = self.outer if arm.outer_lr is None else arm.outer_lr
        momentum = self.momentum if arm.outer_momentum is None else arm.outer_momentum
        arm = replace(arm, outer_momentum=momentum)
        return Job(scale=scale, arm=arm, seed=seed, inner_lr=self.inner, outer_lr=outer)


def grid(scale: Scale, optimizer: Optimizer) -> list[Job]:
    """All jobs of the search."""
    plain, averaged = _arms(scale, optimizer)
    start = {"adamw": scale.inner_lr, "muon": scale.muon_lr}[optimizer]
    rates = [Rates(start * factor, 0.0, 0.0, 0.0) for factor in _FACTORS]
    jobs = [each.job(scale, plain, scale.tuning_seed) for each in rates]
    for factor in _LOCAL_FACTORS:
        for outer, momentum in _OUTER:
            each = Rates(0.0, start * factor, outer, momentum)
            jobs.append(each.job(scale, averaged, scale.tuning_seed))
    return jobs


def best(scale: Scale, optimizer: Optimizer, jobs: Sequence[Job], losses: Sequence[float]) -> Rates:
    """The rates of the jobs with the lowest losses."""
    plain, _ = _arms(scale, optimizer)
    ranked = [job for _, job in sorted(zip(losses, jobs, strict=True), key=lambda pair: pair[0])]
    parallel = next(job for job in ranked if job.arm.name == plain.name)
    averaged = next(job for job in ranked if job.arm.name != plain.name)
    return Rates(parallel.inner_lr, averaged.inner_lr, averaged.outer_lr, averaged.outer_momentum)


def _arms(scale: Scale, optimizer: Optimizer) -> tuple[Arm, Arm]:
    """Data parallel and DiLoCo in fp32."""
    known = arms(scale)
    if optimizer == "muon":
        return known[DATA_PARALLEL_MUON], known[MUON]
    return known[DATA_PARALLEL], known[FP32]
