"""A worker without a model: it trains a vector towards a target of its own, and speaks the real link.

    python -m benchmarks.light_worker '{"numel": 1000, "local_steps": 2, "max_steps": 8, ...}'

Every inner step moves each weight a little towards the target of this world rank, so that every peer's pseudo-gradient
differs and the average is easy to compute. What happens is written to a JSONL file: a record at the start, one when
an epoch's work is handed over, one when its commit is back.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from peers.daemon.link import LINK_ENV, WorkerLink
from peers.state.layout import Layout, ParameterSlot

RATE = 0.1


def target_of(rank: int, numel: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(numel).astype(np.float32)


def initial_weights(numel: int) -> np.ndarray:
    return np.random.default_rng(12345).standard_normal(numel).astype(np.float32)


def train_step(weights: np.ndarray, target: np.ndarray) -> np.ndarray:
    return weights + np.float32(RATE) * (target - weights)


def main(settings: dict[str, Any]) -> None:
    numel, local_steps, max_steps = settings["numel"], settings["local_steps"], settings["max_steps"]
    record = Recorder(Path(settings["history"]))
    link = WorkerLink.connect(os.environ[LINK_ENV])
    layout = Layout(((ParameterSlot("w", (numel,), 0),),))
    link.send("adopt")
    agreed = link.receive("manifest")["manifest"]
    rank = link.hello(layout, local_rank=0, num_local_ranks=1)["world_rank"]
    out, inn = (np.frombuffer(m, np.float32, numel) for m in (link.memories[0].out, link.memories[0].inn))
    target = target_of(rank, numel)
    out[:] = initial_weights(numel) if settings.get("same_seed", True) else target
    link.send("offer", resume=None, local_step=0)
    start = link.receive("start")
    weights, epoch, local_step = inn.copy(), start["epoch"], start["local_step"]
    record("start", **start, local_steps=agreed.get("hv.local_steps"))
    tokens = 0
    while True:
        time.sleep(settings.get("step_s", 0.0))
        weights = train_step(weights, target) + np.float32(settings.get("push", 0.0))
        local_step, tokens = local_step + 1, tokens + settings.get("tokens_per_step", 10)
        nominal = epoch * local_steps + local_step
        loss = float(np.square(weights - target).mean()) if settings.get("tells_loss") else None
        link.send("progress", step=nominal, local_step=local_step, tokens_per_s=1.0, loss=loss)
        if local_step < local_steps and nominal < max_steps:
            continue
        out[:] = weights
        last = nominal >= max_steps
        record("ready", epoch=epoch, step=nominal, tokens=tokens)
        link.send(
            "ready", fragment=0, epoch=epoch, local_step=local_step, tokens=tokens, step=nominal, last=last
        )
        link.send("collect")
        answer = link.receive("committed")
        weights, epoch, local_step = inn.copy(), answer["epoch"], answer["local_step"]
        if answer["world_rank"] in answer["contributors"]:
            tokens = 0
        record("epoch", **answer, **({"anchor": weights.tolist()} if settings.get("tells_anchor") else {}))
        if last:
            break
        if settings.get("checkpoints"):
            link.send("checkpoint", directory=f"{settings['checkpoints']}/{epoch % 2}")
            record("checkpoint", failed=link.receive("checkpointed", "failed").get("reason", ""))
    np.save(settings["history"] + ".npy", weights)
    link.send("finished")
    link.receive("bye")
    record("finished")


class Recorder:
    """Appends one record at a time, whole."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def __call__(self, what: str, **fields: Any) -> None:
        self._file.write(json.dumps({**fields, "kind": what, "time": time.time()}) + "\n")
        self._file.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
