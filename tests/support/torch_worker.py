"""A worker with a real torch model and `Diloco(model)`, for the numerics of whole swarms.

    python -m tests.support.torch_worker '{"local_steps": 3, "max_steps": 9, "optimizer": "adamw", "history": "…"}'

Batches are a pure function of (world rank, step), so the same training can be done without a swarm. After every
commit the flat weights are saved beside the history.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.light_worker import Recorder
from diloco.outer.diloco import Diloco
from diloco.process_end import exit_process


def fresh_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs, torch.sin(inputs[:, :3] * 2)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch_of(rank, step)
    return (model(inputs) - targets).square().mean()


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy()


def main(settings: dict[str, Any]) -> None:
    record = Recorder(Path(settings["history"]))
    model = fresh_model()
    optimizer = optimizer_of(settings["optimizer"], model)
    outer = Diloco(model, max_steps=settings["max_steps"], goes_ahead=settings.get("goes_ahead", True))
    record("start", world_rank=outer.world_rank, epoch=outer.epoch)
    num_steps = 0
    while not outer.done:
        num_steps += 1
        time.sleep(settings.get("step_s", 0.0))
        inner_step(model, optimizer, outer.world_rank, outer.nominal_step)
        if commit := outer.step(num_tokens=8):
            if settings.get("saves", True):
                np.save(f"{settings['history']}.epoch{commit.epoch}.npy", flat(model))
            record(
                "epoch",
                epoch=commit.epoch,
                anchor_digest=commit.anchor_digest,
                fragment=commit.fragment,
                contributors=commit.contributors,
                num_steps=num_steps,
            )
            num_steps = 0
    outer.finish()
    record("finished")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    exit_process(0)
