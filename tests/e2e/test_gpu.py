"""The trainers on CUDA; one GPU is enough. Precision, resume, GPU and CPU in one swarm, reinforcement learning."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from diloco.outer.page_locked import lock_pages
from tests.support.commands import (
    DILOCO,
    check_nothing_left,
    coordinator_at,
    digests_of,
    records_of,
    training_flags,
)
from tests.support.tiny_model import small_bare_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
DEVICE = "cuda"
TRAINER = (sys.executable, "-m", "diloco.train_fsdp")
LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
AGREED = "all peers held bit-identical anchors after every epoch"


def losses(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records_of(run_dir, "step")}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed"])
def test_a_resumed_training_has_the_losses_of_the_undisturbed_one(start, model, tmp_path, precision):
    flags = {"device": DEVICE, "precision": precision, "ckpt.path": tmp_path / "saved"}
    whole = training_flags(model, run_dir="run", max_steps=8, **flags, **{"ckpt.interval": 4})
    first = start(*TRAINER, *whole, name="first")
    assert first.wait() == 0, first.stderr
    again = {"ckpt.resume": tmp_path / "saved" / "model_step_4"}
    second = start(
        *TRAINER, *training_flags(model, run_dir="run", max_steps=8, **flags, **again), name="second"
    )
    assert second.wait() == 0, second.stderr
    expected, resumed = losses(first.directory / "run"), losses(second.directory / "run")
    assert list(expected) == list(range(1, 9)) and list(resumed) == [5, 6, 7, 8]
    # CUDA kernels may sum in another order from run to run.
    assert resumed == pytest.approx({step: expected[step] for step in resumed}, rel=1e-3)


def test_memory_that_cuda_refuses_to_lock_does_not_fail_the_next_kernel():
    memory = torch.zeros(1024)
    # CUDA refuses what is locked already.
    lock_pages(memory)
    lock_pages(memory)
    assert (torch.ones(4, device=DEVICE) + 1).sum().item() == 8.0


def test_compiled_it_trains(start, model):
    flags = training_flags(model, run_dir="run", max_steps=4, device=DEVICE, **{"torch-compile": True})
    ran = start(*TRAINER, *flags)
    assert ran.wait() == 0, ran.stderr
    assert all(math.isfinite(loss) for loss in losses(ran.directory / "run").values())


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_two_peers_on_the_gpu_agree_on_every_bit(start, model, codec):
    hv = {"hv.local-steps": 4, "hv.num-fragments": 2, "hv.overlap-steps": 1, "hv.compression": codec}
    ran = start(*DILOCO, "run", *training_flags(model, run_dir="run", max_steps=16, device=DEVICE, **hv))
    assert ran.wait() == 0, ran.stderr
    assert AGREED in ran.stdout
    check_nothing_left(ran)


def test_a_peer_on_the_gpu_and_one_on_the_cpu_agree_on_every_bit(start, model):
    def flags(device: str) -> list[str]:
        return training_flags(
            model, run_dir="run", max_steps=16, device=device, galaxy_size=2, **{"hv.local-steps": 4}
        )

    maddr = coordinator_at(start)
    peers = [
        start(*DILOCO, "peer", "--initial-peers", maddr, *LOOPBACK, *flags(device), name=device + str(number))
        for number, device in enumerate((DEVICE, "cpu"))
    ]
    assert [peer.wait() for peer in peers] == [0, 0], [peer.stderr for peer in peers]
    gpu, cpu = (digests_of(peer.directory / "run") for peer in peers)
    assert len(gpu) == 4 and gpu == cpu


def test_two_peers_learn_by_reinforcement_on_the_gpu(start, tmp_path):
    model = small_bare_model(tmp_path / "model")
    flags = ("--total-steps", 4, "--total-batch-size", 8, "--grpo.num-generations", 4, "--warmup-steps", 0)
    lengths = ("--grpo.max-completion-length", 8, "--grpo.eval-prompts", 2, "--hv.local-steps", 2)
    place = ("--path-model", model, "--run-dir", tmp_path / "run", "--device", DEVICE, "--rollout", "hf")
    ran = start(*DILOCO, "run", "--mode", "grpo", *place, *flags, *lengths)
    assert ran.wait() == 0, ran.stderr
    assert AGREED in ran.stdout
    first, second = (digests_of(tmp_path / "run" / f"peer-{rank}") for rank in (0, 1))
    assert len(first) == 2 and first == second
