"""The trainer started by path, with -m, and under torchrun: the files that it writes, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from diloco.train.metrics_file import Tail
from peers.daemon.link import LINK_ENV
from tests.support.commands import ROOT, records_of
from tests.support.swarm import wait_until
from tests.support.training import tiny_config

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
BY_PATH, BY_MODULE = ["diloco/train_fsdp.py"], ["-m", "diloco.train_fsdp"]
DEADLINE_S = 400


def flags(directory, *more, path_model=None):
    """Flags that train tiny_config's model, in the spelling of the original instructions."""
    path_model = path_model or tiny_config(directory).path_model
    return [
        *("--path-model", path_model, "--fake-data", "--metric-logger-type", "dummy"),
        *("--total_batch_size", "4", "--per-device-train-batch-size", "2", "--seq-length", "16"),
        *("--no-torch-compile", "--device", "cpu", "--run-dir", str(directory / "run"), *more),
    ]


def start(command, **options):
    environment = {k: v for k, v in os.environ.items() if k != LINK_ENV} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    )


def finished(command):
    process = start(command)
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([*TORCHRUN, *BY_PATH], id="torchrun"),
        pytest.param([sys.executable, *BY_MODULE], id="alone", marks=pytest.mark.exhaustive),
    ],
)
def test_a_training_leaves_its_metrics_and_a_model_that_transformers_loads(tmp_path, command):
    code, output = finished([*command, *flags(tmp_path, "--max-steps", "3", "--log-activations-steps", "2")])
    assert code == 0, output
    steps = records_of(tmp_path / "run", "step")
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert {"epoch", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "time"} <= steps[0].keys()
    said = output.splitlines()
    assert f"run directory: {tmp_path / 'run'}" in said and "starts at step 0, epoch 0" in said
    assert any(line.startswith("step 1  epoch 0  loss") for line in said)
    assert any(line.startswith("verdict ") for line in said) and "PROBLEM" not in output
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    before, after = records_of(tmp_path / "run", "eval")
    assert (before["step"], after["step"]) == (0, 3)
    assert {"loss", "bits_per_byte", "unigram_bits_per_byte", "eval_bytes"} <= before.keys()
    assert [len(record["rms"]) for record in records_of(tmp_path / "run", "activations")] == [3, 3]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert all(torch.isfinite(p).all() for p in saved.parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").decode([104, 105]) == "hi"


@pytest.mark.exhaustive
def test_under_torchrun_the_box_is_there_once(tmp_path):
    code, output = finished([*TORCHRUN, *BY_PATH, *flags(tmp_path, path_model="nowhere")])
    assert code != 0
    assert output.count("╭─ diloco") == 1
    assert "nowhere is not a model" in output


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive)],
)
def test_a_signal_ends_it_at_once_and_leaves_nothing_half_written(tmp_path, number, code):
    checkpoints = tmp_path / "checkpoints"
    command = [sys.executable, *BY_MODULE, *flags(tmp_path)]
    process = start([*command, "--ckpt.path", str(checkpoints), "--ckpt.interval", "1", "--ckpt.topk", "2"])
    try:
        tail = Tail(tmp_path / "run" / "metrics.jsonl")
        wait_until(lambda: any(record.get("step", 0) > 3 for record in tail.read()), "step 4", DEADLINE_S)
        process.send_signal(number)
        process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == code
    assert list(checkpoints.glob(".*")) == []
    assert all((kept / "complete.json").exists() for kept in checkpoints.iterdir())
    assert len(records_of(tmp_path / "run", "step")) > 3
