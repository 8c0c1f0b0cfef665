"""benchmarks.convergence computes in one process what a swarm of daemons and trainers computes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.convergence.settings import FP32, Job, Scale, arms
from benchmarks.convergence.swarm import LocalSwarm
from diloco.data.batches import open_data
from diloco.data.tokenizer import load_tokenizer
from tests.support.commands import DILOCO, digests_of, training_flags


@pytest.mark.exhaustive
def test_the_simulation_arrives_at_the_bits_of_a_swarm_with_a_lossy_codec_and_overlap(start, model, tmp_path):
    text = tmp_path / "text.jsonl"
    rows = [{"text": f"line {n} says that {n} plus {n} is {2 * n}, and so it goes. " * 4} for n in range(200)]
    text.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    scale = Scale(
        name="tiny",
        preset=str(model),
        dataset=str(text),
        seq_length=32,
        num_peers=2,
        peer_batch_size=4,
        local_steps=4,
        total_steps=16,
        warmup_steps=2,
        eval_interval=8,
        eval_tokens=64,
    )
    arm = replace(arms(scale)[FP32], compression="int4", overlap_steps=2)
    job = Job(scale=scale, arm=arm, seed=5, inner_lr=1e-2, outer_lr=0.6)
    flags = training_flags(
        model,
        fake_data=None,
        **{
            "dataset-name-or-path": text,
            "seq-length": scale.seq_length,
            "total-steps": scale.total_steps,
            "warmup-steps": scale.warmup_steps,
            "lr": job.inner_lr,
            "seed": job.seed,
            "hv.local-steps": scale.local_steps,
            "hv.overlap-steps": arm.overlap_steps,
            "hv.compression": arm.compression,
            "hv.outer-lr": job.outer_lr,
            "hv.outer-momentum": job.outer_momentum,
            "run-dir": tmp_path / "run",
        },
    )
    assert start(*DILOCO, "run", *flags).wait() == 0
    assert digests_of(tmp_path / "run" / "peer-1") == digests_of_simulation(job)


def digests_of_simulation(job: Job) -> dict[int, str]:
    torch.set_num_threads(1)
    config = job.scale.train_config(job.seed)
    swarm = LocalSwarm(job, open_data(config, load_tokenizer(config.path_model)))
    digests = {}
    while swarm.num_steps < job.scale.total_steps:
        swarm.step()
        if swarm.epoch:
            digests[swarm.epoch] = swarm.state.anchor_digest
    return digests
