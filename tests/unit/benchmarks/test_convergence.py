"""The study's bookkeeping: which rate is best, which run is which, and what differences it reports."""

import math
from dataclasses import replace

import pytest

from benchmarks.convergence.settings import DATA_PARALLEL, FP32, SCALES, Job, arms
from benchmarks.convergence.store import Outcome
from benchmarks.convergence.summary import (
    curves,
    differences,
    losses_by_bytes,
    results,
    standard_error,
    study_record,
)
from benchmarks.convergence.tuning import Rates, best, grid
from diloco.options.model_files import load_model_config
from diloco.train.model import num_parameters

SCALE = SCALES["1m"]
ARMS = arms(SCALE)


def outcome(arm, seed, loss):
    curve = [(1_000_000, loss + 1), (2_000_000, loss)]
    rates = {"inner_lr": 1e-3, "outer_lr": 0.6, "outer_momentum": 0.6}
    return Outcome(
        arm=arm,
        seed=seed,
        **rates,
        loss=loss,
        curve=curve,
        sent_bytes=2_000_000,
        visible_share=0.5,
        cpu_s=1.0,
    )


def test_every_arm_trains_twenty_tokens_a_parameter_in_whole_epochs():
    parameters = num_parameters(load_model_config(SCALE.path_model))
    assert 1_000_000 < parameters < 3_000_000
    assert SCALE.tokens >= 20 * parameters and SCALE.tokens == 8192 * SCALE.total_steps
    for arm in ARMS.values():
        assert SCALE.total_steps % arm.schedule(SCALE).steps_per_epoch == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_tuning_takes_the_best_rates_of_equally_many_runs(optimizer):
    jobs = grid(SCALE, optimizer)
    assert len(jobs) == len({job.key for job in jobs}) == 25
    assert {job.arm.optimizer for job in jobs} == {optimizer} and {job.seed for job in jobs} == {
        SCALE.tuning_seed
    }
    wanted = jobs[3], jobs[12]
    losses = [1.0 if job in wanted else 2.0 for job in jobs]
    found = best(SCALE, optimizer, jobs, losses)
    assert found.data_parallel == wanted[0].inner_lr
    assert (found.inner, found.outer, found.momentum) == (
        wanted[1].inner_lr,
        wanted[1].outer_lr,
        wanted[1].outer_momentum,
    )


def test_a_run_is_named_by_what_it_computes():
    job = Job(scale=SCALE, arm=ARMS["int8"], seed=1, inner_lr=1e-3, outer_lr=0.6)
    same = replace(job, scale=replace(SCALE, seeds=(7,), inner_lr=9.0), arm=replace(job.arm, target=9.0))
    assert same.key == job.key
    others = [
        replace(job, seed=2),
        replace(job, outer_lr=0.4),
        replace(job, arm=replace(job.arm, compression="int4")),
        replace(job, scale=replace(SCALE, total_steps=10)),
    ]
    assert len({job.key, *(other.key for other in others)}) == 5


def test_differences_are_paired_by_seed():
    found = [outcome(FP32, 1, 2.0), outcome(FP32, 2, 4.0), outcome("int8", 2, 4.04), outcome("int8", 3, 1.0)]
    assert differences("int8", FP32, found) == pytest.approx([1.0])
    assert math.isnan(standard_error([1.0]))
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))


def test_the_record_says_what_was_met_and_what_is_missing():
    chosen = [ARMS[DATA_PARALLEL], ARMS[FP32], ARMS["int8"]]
    found = [outcome(DATA_PARALLEL, s, 1.0) for s in (1, 2, 3)]
    found += [outcome(FP32, s, 1.01 + s / 1000) for s in (1, 2, 3)] + [outcome("int8", 1, 1.1)]
    record = study_record(SCALE, {"adamw": Rates(1e-3, 2e-3, 0.4, 0.7)}, chosen, found, found[:1])
    assert record["partial"] and record["tuning"][0]["outer_lr"] == 0.6
    _, fp32, int8 = record["summary"]
    assert fp32["met"] is None and fp32["% against data parallel"] == "+1.20 ± 0.06"
    assert int8["met"] is False and int8["seeds"] == 1
    assert {(row.case, row.metric) for row in results(chosen, found)} >= {
        ("int8", "loss against fp32"),
        ("fp32", "its standard error (data parallel)"),
    }
    assert curves(chosen, found)["int8"] == [(1.0, (2.1, 2.1, 2.1)), (2.0, (1.1, 1.1, 1.1))]
    assert losses_by_bytes(chosen, found) == {
        "fp32": (2.0, (pytest.approx(1.012), 1.011, 1.013)),
        "int8": (2.0, (1.1, 1.1, 1.1)),
    }
