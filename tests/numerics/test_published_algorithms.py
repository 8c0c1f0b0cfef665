"""DiLoCo and Streaming DiLoCo as their papers print them, in plain torch, against ours over fifty outer steps.

Ours is what benchmarks.convergence runs in one process: the trainer's step, the reduction over sockets, the outer step,
the merge. The versions written here share with it only the model, the samples, and the assignment of parameters to
fragments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.convergence.settings import Arm, Job, Scale
from benchmarks.convergence.swarm import LocalSwarm, learning_rate_of, samples_of
from diloco.data.batches import SampleSource, open_data
from diloco.data.tokenizer import load_tokenizer
from diloco.outer.layout import layout_of
from diloco.train.model import load_model
from tests.support.exhaustive import exhaustive_but
from tests.support.training import tiny_config

NUM_OUTER_STEPS, NUM_PEERS = 50, 2
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.6


@dataclass
class AdamW:
    """Adam (Kingma & Ba) with the decoupled decay of Loshchilov & Hutter on matrices only; betas 0.9 and 0.95."""

    decay: float
    steps: int = 0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def step(self, name: str, weight: Tensor, gradient: Tensor, lr: float) -> None:
        zeros = (torch.zeros_like(weight), torch.zeros_like(weight))
        first, second = self.moments.setdefault(name, zeros)
        first += 0.1 * (gradient - first)
        second += 0.05 * (gradient * gradient - second)
        if weight.ndim >= 2:
            weight -= lr * self.decay * weight
        unbiased = first / (1 - 0.9**self.steps), second / (1 - 0.95**self.steps)
        weight -= lr * unbiased[0] / (unbiased[1].sqrt() + 1e-8)


@dataclass
class Muon(AdamW):
    """Jordan's Muon with MuLoCo's sqrt(fan_out / fan_in); all but hidden matrices use AdamW at a fifth of the rate."""

    momenta: dict[str, Tensor] = field(default_factory=dict)

    def step(self, name: str, weight: Tensor, gradient: Tensor, lr: float) -> None:
        if "_proj" not in name:
            super().step(name, weight, gradient, 0.2 * lr)
            return
        momentum = self.momenta.setdefault(name, torch.zeros_like(weight))
        momentum += 0.05 * (gradient - momentum)
        x = 0.05 * gradient + 0.95 * momentum
        x = x / x.norm()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        weight -= lr * self.decay * weight + lr * (weight.shape[0] / weight.shape[1]) ** 0.5 * x


def inner_step(model: nn.Module, optimizer: AdamW, samples: Tensor, lr: float) -> None:
    model.zero_grad()
    logits = model(input_ids=samples[:, :-1]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = sum(g.square().sum() for g in gradients.values()) ** 0.5
    optimizer.steps += 1
    with torch.no_grad():
        for name, weight in model.named_parameters():
            optimizer.step(name, weight, gradients[name] * min(1.0, 1 / (float(norm) + 1e-6)), lr)


@dataclass
class Outer:
    """SGD with Nesterov momentum on the weights that all peers share."""

    shared: dict[str, Tensor]
    momentum: dict[str, Tensor] = field(default_factory=dict)

    def step(self, name: str, locals_: list[Tensor]) -> Tensor:
        delta = sum(self.shared[name] - local for local in locals_) / len(locals_)
        old = self.momentum.get(name, torch.zeros_like(delta))
        self.momentum[name] = new = OUTER_MOMENTUM * old + delta
        self.shared[name] = self.shared[name] - OUTER_LR * (OUTER_MOMENTUM * new + delta)
        return self.shared[name]


def published(job: Job, source: SampleSource, optimizer: Callable[[], AdamW]) -> dict[str, Tensor]:
    """Algorithm 1 of arXiv 2311.08105, which is algorithm 2 of arXiv 2501.18512 for one fragment and no overlap."""
    arm, every = job.arm, job.scale.local_steps // job.arm.num_fragments
    models = [load_model(job.scale.path_model, seed=job.seed) for _ in range(NUM_PEERS)]
    fragments = [[slot.name for slot in f] for f in layout_of(models[0], arm.num_fragments).fragments]
    outer = Outer({name: p.detach().clone() for name, p in models[0].named_parameters()})
    optimizers, sent = [optimizer() for _ in models], {}
    for step in range(1, NUM_OUTER_STEPS * every + 1):
        for rank, (model, inner) in enumerate(zip(models, optimizers, strict=True)):
            samples = torch.from_numpy(samples_of(source, job, rank, step - 1))
            inner_step(model, inner, samples, learning_rate_of(job, step - 1))
        weights = [dict(model.named_parameters()) for model in models]
        if (step + arm.overlap_steps) % every == 0:
            due = fragments[((step + arm.overlap_steps) // every - 1) % len(fragments)]
            sent = {name: [w[name].detach().clone() for w in weights] for name in due}
        if step % every == 0:
            for name, locals_ in sent.items():
                new = outer.step(name, locals_)
                for local in (w[name].data for w in weights):
                    local.copy_(arm.mixing * local + (1 - arm.mixing) * new if arm.overlap_steps else new)
    return outer.shared


def ours(job: Job, source: SampleSource) -> LocalSwarm:
    swarm = LocalSwarm(job, source)
    while swarm.epoch < NUM_OUTER_STEPS:
        swarm.step()
    return swarm


ARMS = [
    Arm(name="diloco", optimizer="adamw"),
    Arm(name="diloco", optimizer="muon"),
    Arm(name="streaming", optimizer="adamw", num_fragments=2, overlap_steps=1, mixing=0.5),
    Arm(name="streaming", optimizer="muon", num_fragments=2, overlap_steps=1, mixing=0.25),
]


@pytest.mark.parametrize(
    "arm",
    exhaustive_but(
        ARMS[1:3],
        ARMS,
    ),
    ids=lambda arm: f"{arm.name}-{arm.optimizer}",
)
def test_fifty_outer_steps_end_where_the_papers_own_do(arm, tmp_path):
    tiny_config(tmp_path)
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(f'{{"text": "{n} and {n} make {2 * n}, as they always do."}}\n' for n in range(400))
    )
    scale = Scale(
        name="tiny",
        preset=str(tmp_path / "model"),
        dataset=str(text),
        seq_length=16,
        num_peers=NUM_PEERS,
        local_steps=2 * arm.num_fragments,
        # More steps than the test takes: at the end of a run all fragments are averaged.
        total_steps=3 * NUM_OUTER_STEPS,
        peer_batch_size=1,
        warmup_steps=5,
        eval_interval=10,
        eval_tokens=512,
    )
    rate, optimizer, decay = (2e-3, AdamW, 0.1) if arm.optimizer == "adamw" else (2e-3, Muon, 2e-3)
    job = Job(
        scale=scale,
        arm=replace(arm, outer_momentum=OUTER_MOMENTUM),
        seed=3,
        inner_lr=rate,
        outer_lr=OUTER_LR,
    )
    source = open_data(scale.train_config(job.seed), load_tokenizer(scale.path_model))
    swarm, expected = ours(job, source), published(job, source, lambda: optimizer(decay))
    layout = layout_of(swarm.replicas[0].inner.model, arm.num_fragments)
    moved = 0.0
    start = dict(load_model(scale.path_model, seed=job.seed).named_parameters())
    for anchor, slots in zip(swarm.state.anchor, layout.fragments, strict=True):
        for slot in slots:
            found = anchor[slot.offset : slot.offset + slot.numel].view(slot.shape)
            torch.testing.assert_close(found, expected[slot.name], rtol=0, atol=1e-6)
            moved = max(moved, float((found - start[slot.name].detach()).abs().max()))
    assert moved > 0.05
