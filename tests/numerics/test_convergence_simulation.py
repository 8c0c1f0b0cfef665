"""What benchmarks.convergence simulates in one process, against algebra, torch, and its own interruption."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.convergence.run import run_job
from benchmarks.convergence.settings import DATA_PARALLEL, FP32, Job, Scale, arms
from benchmarks.convergence.store import Store
from benchmarks.convergence.swarm import LocalSwarm, learning_rate_of, new_replica, samples_of
from diloco.data.batches import open_data
from diloco.data.tokenizer import load_tokenizer
from diloco.train.optim import adamw
from tests.support.training import tiny_config


@pytest.fixture(scope="module")
def scale(tmp_path_factory) -> Scale:
    """Two peers, six epochs of four steps each, on a few sentences."""
    directory = tmp_path_factory.mktemp("scale")
    tiny_config(directory)
    text = directory / "text.jsonl"
    rows = [{"text": f"line {n} says that {n} plus {n} is {2 * n}, and so it goes. " * 4} for n in range(200)]
    text.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return Scale(
        name="tiny",
        preset=str(directory / "model"),
        dataset=str(text),
        seq_length=16,
        num_peers=2,
        local_steps=4,
        total_steps=24,
        warmup_steps=2,
        eval_interval=8,
        curve_tokens=64,
        eval_tokens=512,
        # The trainer's own.
        beta2=0.95,
    )


def job_of(scale: Scale, name: str, **changes) -> Job:
    overlap = {"streaming": 1, "one-epoch delay": 3}.get(name, 0)
    fragments = 2 if name == "streaming" else 1
    arm = replace(arms(scale)[name], num_fragments=fragments, overlap_steps=overlap, **changes)
    return Job(scale=scale, arm=arm, seed=3, inner_lr=1e-2, outer_lr=0.6)


def trained(job: Job) -> LocalSwarm:
    config = job.scale.train_config(job.seed)
    swarm = LocalSwarm(job, open_data(config, load_tokenizer(config.path_model)))
    while swarm.num_steps < job.scale.total_steps:
        swarm.step()
    return swarm


def test_fp32_is_plain_diloco_with_torchs_own_optimizers(scale):
    job = job_of(scale, FP32)
    swarm = trained(job)
    expected = plain_diloco(job)
    np.testing.assert_allclose(swarm.state.anchor[0].numpy(), expected.numpy(), rtol=0, atol=2e-6)


def test_peers_end_on_the_anchor_and_every_fragment_counts_every_token(scale):
    for name in (FP32, "streaming", "one-epoch delay"):
        swarm = trained(job_of(scale, name))
        fragments = swarm.schedule.num_fragments
        # The last epoch averages a fragment, and the end each of the others once more.
        assert swarm.epoch == scale.total_steps * fragments // scale.local_steps + fragments - 1
        assert swarm.committed_tokens == fragments * scale.tokens
        for replica in swarm.replicas:
            for piece in replica.pieces:
                there = swarm.state.anchor[piece.fragment][piece.start : piece.start + piece.local.numel()]
                assert torch.equal(piece.local.reshape(-1), there)


def test_a_delay_of_no_steps_and_one_fragment_is_classic_diloco(scale):
    classic, delayed = trained(job_of(scale, FP32)), trained(job_of(scale, "one-epoch delay"))
    same = trained(replace(job_of(scale, FP32), arm=replace(arms(scale)["one-epoch delay"], overlap_steps=0)))
    assert torch.equal(classic.state.anchor[0], same.state.anchor[0])
    assert not torch.equal(classic.state.anchor[0], delayed.state.anchor[0])


@pytest.mark.parametrize("name", [DATA_PARALLEL, FP32, "int4", "topk", "streaming", "one-epoch delay"])
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(scale, name, tmp_path, monkeypatch):
    job = job_of(scale, name)
    whole = run_job(job, tmp_path / "whole", say=lambda line: None)

    monkeypatch.setattr("benchmarks.convergence.run.SAVE_INTERVAL_S", 0.0)
    save, saved = Store.save, []

    def save_and_stop(store, *arguments):
        save(store, *arguments)
        saved.append(arguments[1].num_steps)
        if len(saved) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, tmp_path / "parts", say=lambda line: None)
    assert 0 < saved[-1] < scale.total_steps
    resumed = run_job(job, tmp_path / "parts", say=lambda line: None)
    assert (resumed.loss, resumed.curve) == (whole.loss, whole.curve)
    assert run_job(job, tmp_path / "parts") == resumed and len(list((tmp_path / "parts").iterdir())) == 1


def plain_diloco(job: Job) -> torch.Tensor:
    """The final weights of DiLoCo (arXiv 2311.08105, algorithm 1), with torch's Nesterov SGD."""
    scale, config = job.scale, job.scale.train_config(job.seed)
    source = open_data(config, load_tokenizer(config.path_model))
    peers = [new_replica(job, 1).inner.model for _ in range(scale.num_peers)]
    optimizers = [adamw(model, weight_decay=config.weight_decay) for model in peers]
    anchor = [p.detach().clone() for p in peers[0].parameters()]
    outer = torch.optim.SGD(anchor, lr=job.outer_lr, momentum=job.arm.outer_momentum, nesterov=True)
    for step in range(scale.total_steps):
        for rank, (model, optimizer) in enumerate(zip(peers, optimizers, strict=True)):
            samples = torch.from_numpy(samples_of(source, job, rank, step))
            logits = model(input_ids=samples[:, :-1]).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_of(job, step)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % scale.local_steps == 0:
            locals_ = zip(*(model.parameters() for model in peers), strict=True)
            for value, copies in zip(anchor, locals_, strict=True):
                value.grad = torch.stack([value - copy.detach() for copy in copies]).mean(dim=0)
            outer.step()
            with torch.no_grad():
                for model in peers:
                    for parameter, value in zip(model.parameters(), anchor, strict=True):
                        parameter.copy_(value)
    return torch.cat([value.reshape(-1) for value in anchor])
