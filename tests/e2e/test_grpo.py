"""`diloco run --mode grpo`: a few steps on an untrained model, and a full run on one that knows the answer format."""

from __future__ import annotations

import sys

import pytest

from benchmarks.format_model import TASK, train_format_model
from diloco.errors import UserError
from tests.support.commands import DILOCO, check_nothing_left, digests_of, records_of, text_of_boxes
from tests.support.tiny_model import small_bare_model

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
TRAINER = (sys.executable, "-m", "diloco.train_grpo")
SHORT = ("--device", "cpu", "--rollout", "hf", "--hv.local-steps", 2, "--warmup-steps", 0)
LEARNING_TIMEOUT_S = 900.0


@pytest.mark.exhaustive
def test_two_peers_learn_by_reinforcement_and_agree_on_every_bit(start, tmp_path):
    model = small_bare_model(tmp_path / "model")
    flags = ("--total-steps", 4, "--total-batch-size", 8, "--grpo.num-generations", 4)
    lengths = ("--grpo.max-completion-length", 8, "--grpo.eval-prompts", 2, "--run-dir", tmp_path / "run")
    ran = start(*DILOCO, "run", "--mode", "grpo", "--path-model", model, *SHORT, *flags, *lengths)
    assert ran.wait() == 0, ran.stderr
    assert "all peers held bit-identical anchors after every epoch" in ran.stdout
    assert "\nverdict                 " in ran.stdout
    assert (
        digests_of(tmp_path / "run" / "peer-0") == digests_of(tmp_path / "run" / "peer-1")
        and len(digests_of(tmp_path / "run" / "peer-0")) == 2
    )
    steps = [
        r for rank in (0, 1) for r in records_of(tmp_path / "run" / f"peer-{rank}") if r["kind"] == "step"
    ]
    assert len(steps) == 8 and all(0.0 <= r["reward"] <= 1.0 for r in steps)
    assert (tmp_path / "run" / "reward.png").is_file()
    assert (tmp_path / "run" / "peer-0" / "model" / "model.safetensors").is_file()
    check_nothing_left(ran)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return small_bare_model(tmp_path / "model")


def test_a_trainer_that_is_started_by_hand_ends_with_a_report(start, bare, tmp_path):
    flags = ("--total-steps", 4, "--total-batch-size", 8, "--grpo.num-generations", 4)
    lengths = ("--grpo.max-completion-length", 8, "--grpo.eval-prompts", 2, "--run-dir", tmp_path / "run")
    ran = start(*TRAINER, "--path-model", bare, *SHORT, *flags, *lengths)
    assert ran.wait() == 0, ran.stderr
    assert "\nverdict                 " in ran.stdout
    assert "\ntrained on              32 completions in " in ran.stdout
    assert "averaged" not in ran.stdout and "PROBLEM" not in ran.stdout
    assert (tmp_path / "run" / "reward.png").is_file()


@pytest.mark.exhaustive
def test_two_ranks_train_on_each_others_completions(start, bare, tmp_path):
    flags = ("--total-steps", 2, "--total-batch-size", 24, "--per-device-train-batch-size", 12)
    more = ("--grpo.num-generations", 8, "--grpo.max-completion-length", 8, "--grpo.eval-prompts", 2)
    argv = (
        *TORCHRUN,
        *TRAINER[1:],
        "--path-model",
        bare,
        *SHORT,
        *flags,
        *more,
        "--run-dir",
        tmp_path / "run",
    )
    ran = start(*argv)
    assert ran.wait() == 0, ran.stderr
    assert "\ntrained on              48 completions in " in ran.stdout
    check_nothing_left(ran)


@pytest.mark.exhaustive
def test_a_task_that_there_is_not_ends_the_trainer_with_exit_code_2(start, bare):
    ran = start(*TRAINER, "--path-model", bare, "--dataset", "gsm9k", *SHORT)
    assert ran.wait() == 2
    assert "--dataset gsm9k is no task" in text_of_boxes(ran.stderr)[-1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--device", "cpu", "--grpo.vllm-python", sys.executable), "has no vLLM"),
        ((*SHORT, "--total-batch-size", 12, "--grpo.num-generations", 8), "--total-batch-size 16 would do"),
        ((*SHORT, "--grpo.steps-per-generation", 6), "a multiple of"),
        (("--mode", "pretrain", *SHORT), "start diloco.train_fsdp"),
        (("--dataset", "gsm9k", *SHORT), "--dataset gsm9k is no task"),
    ],
)
def test_what_cannot_work_is_said_before_training(bare, flags, says):
    from diloco.train_grpo import run

    with pytest.raises(UserError, match=says):
        run([str(word) for word in ("--path-model", bare, *flags)], [])


@pytest.mark.learning
def test_the_mean_reward_of_two_peers_rises_from_under_three_tenths_to_over_six(start, tmp_path):
    train_format_model(tmp_path / "model")
    flags = ("--total-steps", 60, "--total-batch-size", 64, "--lr", "2e-3", "--hv.local-steps", 5)
    outer = ("--hv.outer-lr", 0.9, "--hv.outer-momentum", 0.3, "--grpo.max-completion-length", 32)
    ran = start(
        *(*DILOCO, "run", "--mode", "grpo", "--path-model", tmp_path / "model", "--dataset", TASK),
        *("--device", "cpu", "--rollout", "hf", "--warmup-steps", 0, "--grpo.eval-prompts", 32),
        *flags,
        *outer,
        *("--run-dir", tmp_path / "run"),
    )
    assert ran.wait(LEARNING_TIMEOUT_S) == 0, ran.stderr
    rewards = {
        r["step"]: r["reward"]
        for rank in (0, 1)
        for r in records_of(tmp_path / "run" / f"peer-{rank}")
        if r["kind"] == "eval"
    }
    assert rewards[0] < 0.3 and rewards[60] > 0.6
    first, second = digests_of(tmp_path / "run" / "peer-0"), digests_of(tmp_path / "run" / "peer-1")
    assert all(first[epoch] == second[epoch] for epoch in first.keys() & second.keys())
    assert len(first.keys() & second.keys()) >= 8
    assert (tmp_path / "run" / "reward.png").stat().st_size > 10_000
