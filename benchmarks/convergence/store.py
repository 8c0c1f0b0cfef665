"""Stores the results of a study's finished runs, and the state of unfinished ones."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.convergence.settings import Job
from benchmarks.convergence.swarm import DataParallel, LocalSwarm, all_tensors
from peers.state import files as state_files

Swarm = LocalSwarm | DataParallel


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run."""

    arm: str
    seed: int
    inner_lr: float
    outer_lr: float
    outer_momentum: float
    loss: float
    """Held-out loss at the end, in nats per byte."""
    curve: list[tuple[int, float]]
    """(tokens trained by all peers, loss on a subset of the held-out tokens)."""
    sent_bytes: int
    """Bytes sent per peer in all epochs; 0 for data parallel, which is not distributed here."""
    visible_share: float
    """Mean share of a peer's weights in which bf16 shows the training of one epoch; 1 for data parallel."""
    cpu_s: float
    """CPU time of the run, including evaluations."""


class Store:
    """A directory with `<key>.json` for each finished run, and `<key>.state/` for each unfinished one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def outcome(self, job: Job) -> Outcome | None:
        path = self._directory / f"{job.key}.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))["outcome"]
        return Outcome(**{**found, "curve": [(tokens, loss) for tokens, loss in found["curve"]]})

    def finish(self, job: Job, outcome: Outcome) -> None:
        """Write the result and delete the state."""
        path = self._directory / f"{job.key}.json"
        text = json.dumps({"job": asdict(job), "outcome": asdict(outcome)}, indent=1)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
        shutil.rmtree(self._state_dir(job), ignore_errors=True)

    def save(self, job: Job, swarm: Swarm, progress: dict[str, Any]) -> None:
        """Replace the saved state. If the process is killed meanwhile, the previous state or none is left."""
        directory = self._state_dir(job)
        temporary = directory.with_suffix(f".{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        tensors = dict(all_tensors(swarm))
        torch.save(
            {"tensors": tensors, "progress": progress, "num_steps": swarm.num_steps}, temporary / "peers"
        )
        if isinstance(swarm, LocalSwarm):
            torch.save(swarm.carried(), temporary / "carried")
            state_files.save(swarm.state, temporary)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)

    def restore(self, job: Job, swarm: Swarm) -> dict[str, Any] | None:
        """Restore the swarm's saved state, if any; returns the progress saved with it."""
        directory = self._state_dir(job)
        if not directory.is_dir():
            return None
        saved = torch.load(directory / "peers", weights_only=True)
        with torch.no_grad():
            _restore_tensors(swarm, saved["tensors"])
        swarm.num_steps = saved["num_steps"]
        if isinstance(swarm, LocalSwarm):
            swarm.state = state_files.load(directory)
            swarm.carry(torch.load(directory / "carried", weights_only=True))
        progress: dict[str, Any] = saved["progress"]
        return progress

    def _state_dir(self, job: Job) -> Path:
        return self._directory / f"{job.key}.state"


def _restore_tensors(swarm: Swarm, tensors: dict[str, Tensor]) -> None:
    """Load the weights of all models and the states of their optimizers."""
    for rank, replica in enumerate(swarm.replicas):
        for name, parameter in replica.inner.model.named_parameters():
            key = f"{rank}.{name}"
            parameter.copy_(tensors[key])
            state = {k.removeprefix(f"{key}."): v for k, v in tensors.items() if _is_state(k, key)}
            if state:
                replica.inner.optimizer.state[parameter] = state


def _is_state(name: str, parameter: str) -> bool:
    return name.startswith(f"{parameter}.") and "." not in name[len(parameter) + 1 :]
