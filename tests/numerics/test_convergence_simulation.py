"""benchmarks.convergence simulates a swarm in one process: compared with torch, and with interrupted runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.convergence.run import run_job
from benchmarks.convergence.settings import DATA_PARALLEL, MUON, Job, Scale, arms
from benchmarks.convergence.store import Store
from benchmarks.convergence.swarm import LocalSwarm
from diloco.data.batches import SampleSource, open_data
from diloco.data.tokenizer import load_tokenizer
from tests.support.training import tiny_config

SLOW = "one peer 4x slower"


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
        peer_batch_size=1,
    )


def job_of(scale: Scale, name: str, **changes) -> Job:
    overlap = {"streaming": 1, "streaming mixed": 1, "one-epoch delay": 3}.get(name, 0)
    fragments = 2 if name.startswith("streaming") else 1
    arm = replace(arms(scale)[name], num_fragments=fragments, overlap_steps=overlap, **changes)
    return Job(scale=scale, arm=arm, seed=3, inner_lr=1e-2, outer_lr=0.6)


def source_of(scale: Scale) -> SampleSource:
    config = scale.train_config(seed=3)
    return open_data(config, load_tokenizer(config.path_model))


def trained(job: Job) -> LocalSwarm:
    swarm = LocalSwarm(job, source_of(job.scale))
    while swarm.num_steps < job.scale.total_steps:
        swarm.step()
    return swarm


def test_a_slow_peer_is_in_every_fourth_commit_with_all_its_work_and_in_the_last(scale):
    scale = replace(scale, total_steps=40)
    swarm = LocalSwarm(job_of(scale, SLOW), source_of(scale))
    counted = []
    while swarm.num_steps < scale.total_steps:
        swarm.step()
        if swarm.at_rest:
            counted.append(swarm.committed_tokens // scale.seq_length)
    # Each epoch adds 4 samples of the fast peer, every fourth also 4 of the slow one, and the last its remaining 2.
    assert counted == [4, 8, 12, 20, 24, 28, 32, 40, 44, 50]
    for replica in swarm.replicas:
        replica.weights.put()
        assert torch.equal(replica.weights.out[0], swarm.state.anchor[0])


@pytest.mark.parametrize("name", [DATA_PARALLEL, MUON, "topk", "streaming mixed", "one-epoch delay", SLOW])
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
