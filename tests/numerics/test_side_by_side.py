"""Jobs that run side by side, in batched matrix products, give the results of jobs that run one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.convergence.run import run_job
from benchmarks.convergence.settings import SCALES, Job, arms
from benchmarks.convergence.side_by_side import run_jobs
from benchmarks.convergence.stacked_llama import Forward, Shape, Stack
from diloco.options.model_files import load_model_config
from diloco.train.model import load_model

SCALE = replace(SCALES["quick"], inner_lr=4e-3)
NAMES = (
    "data parallel",
    "data parallel muon",
    "muon",
    "int4",
    "streaming mixed",
    "one peer 2x slower",
)


def test_many_llamas_have_the_losses_that_transformers_gives_each():
    config = load_model_config(SCALE.path_model)
    stack = Stack(config, 3, torch.device("cpu"))
    tokens = torch.randint(0, config["vocab_size"], (3, 2, 17), generator=torch.Generator().manual_seed(0))
    expected = []
    for number in range(3):
        model = load_model(SCALE.path_model, seed=number)
        for name, values in stack.named_parameters(number):
            values.copy_(dict(model.named_parameters())[name].detach())
        logits = model(input_ids=tokens[number, :, :-1]).logits
        expected.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[number, :, 1:].flatten())
        )
    found = Forward(Shape.of(config)).losses(stack.views(), tokens)
    assert found.tolist() == pytest.approx([value.item() for value in expected], rel=1e-5)


@pytest.mark.exhaustive
def test_jobs_side_by_side_end_where_each_ends_alone(tmp_path):
    jobs = [Job(scale=SCALE, arm=arms(SCALE)[name], seed=1, inner_lr=4e-3, outer_lr=0.6) for name in NAMES]
    together = {outcome.arm: outcome for outcome in run_jobs(jobs, tmp_path / "together")}
    for job in jobs:
        alone, beside = run_job(job, tmp_path / "alone"), together[job.arm.name]
        assert beside.loss == pytest.approx(alone.loss, rel=1e-4), job.arm.name
        assert [tokens for tokens, _ in beside.curve] == [tokens for tokens, _ in alone.curve]
        assert [loss for _, loss in beside.curve] == pytest.approx(
            [loss for _, loss in alone.curve], rel=1e-4
        )
        assert beside.sent_bytes == alone.sent_bytes
        assert beside.visible_share == pytest.approx(alone.visible_share, abs=2e-3)
