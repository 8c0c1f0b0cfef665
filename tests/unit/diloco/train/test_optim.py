from __future__ import annotations

import pytest
import torch

from diloco.train.optim import FLOOR, adamw, learning_rate
from tests.support.tiny_model import tiny_llama

SCHEDULE = {"peak": 1.0, "warmup_steps": 10, "total_steps": 110}


def test_warm_up_is_linear_and_reaches_the_peak():
    assert [learning_rate(step, **SCHEDULE) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])


def test_cosine_falls_from_the_peak_to_a_tenth_and_stays_there():
    values = [learning_rate(step, **SCHEDULE) for step in range(10, 130)]
    assert values[0] == 1.0
    assert values[50] == pytest.approx((1 + FLOOR) / 2)
    assert values == sorted(values, reverse=True)
    assert values[-1] == values[100] == pytest.approx(FLOOR)


def test_without_warm_up_the_first_step_has_the_peak():
    assert learning_rate(0, peak=2.0, warmup_steps=0, total_steps=10) == 2.0


def test_a_run_that_is_all_warm_up_has_a_schedule():
    assert learning_rate(20, peak=1.0, warmup_steps=20, total_steps=20) == 1.0


def test_only_matrices_decay():
    model = tiny_llama()
    decayed, kept = adamw(model, weight_decay=0.5).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in kept["params"]} == {1}
    total = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for group in (decayed, kept) for p in group["params"]) == total


def test_frozen_parameters_are_left_alone():
    model = tiny_llama()
    model.lm_head.weight.requires_grad_(False)
    parameters = [p for group in adamw(model, weight_decay=0.0).param_groups for p in group["params"]]
    assert not any(p is model.lm_head.weight for p in parameters)
    assert torch.is_tensor(parameters[0])
