"""The `diloco grpo-sweep` command on a machine without GPUs."""

from __future__ import annotations

import json
import tomllib

import pytest

from tests.support.commands import DILOCO, text_of_boxes
from tests.support.tiny_model import small_bare_model

SHORT = (
    *(
        "--device",
        "cpu",
        "--rollout",
        "hf",
        "--warmup-steps",
        0,
        "--total-batch-size",
        8,
        "--grpo.eval-prompts",
        2,
    ),
    *("--grpo.max-completion-length", 8, "--grpo.num-generations", 4, "--eval-every", 40),
)


@pytest.mark.exhaustive
def test_an_instance_that_fails_is_reported_and_the_other_one_finishes(start, tmp_path):
    model, here = small_bare_model(tmp_path / "model"), tmp_path / "here"
    (here / "outputs").mkdir(parents=True)
    name = "trl_reasoning-gym-chain_sum_instance{}_seed{}"
    (here / "outputs" / name.format(1, 1337)).write_text("in the way")
    ran = start(
        *(*DILOCO, "grpo-sweep", "--path-model", model, "--instances", 2, "--seeds", "42,1337", *SHORT),
        *("--total-steps", 2),
        cwd=here,
    )
    assert ran.wait() == 1
    assert "1 of 2 instances failed: instance 1" in ran.stderr
    done = here / "outputs" / name.format(0, 42)
    steps = [json.loads(line) for line in (done / "metrics.jsonl").read_text().splitlines()]
    assert sum(record["kind"] == "step" for record in steps) == 2
    assert tomllib.loads((done / "config.toml").read_text())["seed"] == 42
    assert (done / "model" / "model.safetensors").is_file()
    logs = sorted(path.name for path in (here / "logs" / "parallel_training").glob("*.log"))
    assert logs == ["training_instance0_cpu_seed42.log", "training_instance1_cpu_seed1337.log"]
    assert "instance 0, seed 42: finished" in ran.stdout and "instance 1, seed 1337: FAILED" in ran.stdout


def test_a_model_that_there_is_not_is_said_before_anything_starts(start, tmp_path):
    ran = start(
        *DILOCO,
        "grpo-sweep",
        "--path-model",
        "tiny-gpro",
        "--instances",
        2,
        *SHORT,
        "--run-dir",
        "here",
        cwd=tmp_path,
    )
    assert ran.wait() == 2
    assert "tiny-gpro is not a model" in text_of_boxes(ran.stderr)[-1]
    assert "--run-dir has no effect in a sweep" in ran.stderr
    assert not (tmp_path / "logs").exists() and not (tmp_path / "outputs").exists()
