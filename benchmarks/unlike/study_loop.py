"""Trains the convergence study's model in a swarm, with steps of a given duration.

    diloco peer ... --worker "python -m benchmarks.unlike.study_loop '{\"scale\": \"80k\", ...}'"

A step computes and then sleeps for the rest of its duration, so several peers with real losses can share a few cores.
The learning rate depends on the elapsed time, so that its schedule ends together with the run. At the end, work that is
left is averaged, and the model is written beside the history.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.convergence.settings import SCALES, Arm, Job
from benchmarks.convergence.swarm import new_replica
from benchmarks.light_loop import Paced
from benchmarks.light_worker import Recorder
from diloco.data.batches import open_data
from diloco.data.sampling import Block, step_offsets
from diloco.data.tokenizer import load_tokenizer
from diloco.outer.diloco import Diloco
from diloco.train.optim import learning_rate

MODEL = "model.pt"
_RATES = 1000
"""How many times the learning rate changes in a run."""
_WARMUP = 50


@dataclass(frozen=True, kw_only=True)
class StudyLoop(Paced):
    """What one peer trains, and for how long. A step lasts `wait_s` in all; epochs have no gate."""

    scale: str
    seed: int
    lr: float
    local_steps: int
    seconds: float
    """How long to train, from the first step on."""

    @property
    def job(self) -> Job:
        scale = replace(SCALES[self.scale], local_steps=self.local_steps)
        return Job(scale=scale, arm=Arm(name="unlike"), seed=self.seed, inner_lr=self.lr, outer_lr=0.0)


def main(loop: StudyLoop) -> None:
    torch.set_num_threads(1)
    scale = loop.job.scale
    config = scale.train_config(loop.seed)
    source = open_data(config, load_tokenizer(config.path_model))
    inner = new_replica(loop.job, num_fragments=1).inner
    outer = Diloco(inner.model)
    record, number, began_at = Recorder(Path(loop.history)), 0, time.monotonic()
    record("start", epoch=outer.epoch, world_rank=outer.world_rank)
    while (elapsed_s := time.monotonic() - began_at) < loop.seconds:
        at, number = outer.position, number + 1
        data_base = at.data_base * source.samples_per_block
        block = Block(epoch=at.epoch, world_rank=outer.world_rank or 0, data_base=data_base)
        samples = source.read(block, step_offsets(at.local_step, total_batch_size=scale.peer_batch_size))
        done = int(_RATES * elapsed_s / loop.seconds)
        lr = learning_rate(done, peak=loop.lr, warmup_steps=_WARMUP, total_steps=_RATES)
        inner.step(torch.from_numpy(samples), lr=lr)
        time.sleep(max(0.0, began_at + elapsed_s + loop.wait_s - time.monotonic()))
        commit = outer.step(num_tokens=scale.peer_batch_size * scale.seq_length)
        if commit is not None:
            record("epoch", step=number, **asdict(commit))
    outer.finish()
    torch.save(inner.model.state_dict(), Path(loop.history).with_name(MODEL))
    last = outer.last_commit
    record("end", step=number, num_contributors=len(last.contributors) if last else 0)


if __name__ == "__main__":
    main(StudyLoop(**json.loads(sys.argv[1])))
