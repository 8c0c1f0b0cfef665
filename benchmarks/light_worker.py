"""A worker without a model, which moves a vector towards its own target and uses the real link to the daemon.

    python -m benchmarks.light_worker '{"numel": 1000, "local_steps": 2, "max_steps": 8, ...}'

Every inner step moves each weight a little towards the target of this world rank, so peers have different
pseudo-gradients, whose average is easy to compute. Writes records to a JSONL file: at the start, when an epoch's work
is handed over, and when its commit is received.
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


class LightWorker:
    """The training loop, from its start to its end."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._record = Recorder(Path(settings["history"]))
        self._link = link = WorkerLink.connect(os.environ[LINK_ENV])
        numel = settings["numel"]
        layout = Layout(((ParameterSlot("w", (numel,), 0),),))
        link.send("adopt")
        agreed = link.receive("manifest")["manifest"]
        rank = link.hello(layout, local_rank=0)["world_rank"]
        self._out, self._in = (
            np.frombuffer(memory, np.float32, numel)
            for memory in (link.memories[0].out, link.memories[0].inn)
        )
        self._target = target_of(rank, numel)
        self._out[:] = initial_weights(numel) if settings.get("same_seed", True) else self._target
        link.send("offer", resume=None, local_step=0)
        start = link.receive("start")
        self._weights, self._epoch, self._local_step = self._in.copy(), start["epoch"], start["local_step"]
        self._record("start", **start, local_steps=agreed.get("hv.local_steps"))
        self._tokens, self._step_s = 0, 0.0
        self._loss: float | None = None
        self._handed: int | None = None
        """Tokens of the work that waits for its commit, if any."""
        self._is_ahead = self._is_last = self._is_over = False

    def run(self) -> None:
        while not self._is_over:
            self._train()
            if self._is_ahead:
                self._ask("poll")
            while self._is_at_end and not self._is_over:
                if self._handed is None:
                    self._hand_over()
                self._ask("collect", may_go_ahead=not (self._is_ahead or self._is_last))
        np.save(self._settings["history"] + ".npy", self._weights)
        self._link.send("finished")
        self._link.receive("bye")
        self._record("finished")

    @property
    def _nominal_step(self) -> int:
        return int(self._epoch * self._settings["local_steps"] + self._local_step)

    @property
    def _is_at_end(self) -> bool:
        """Whether it is at the end of its epoch or of the run."""
        settings = self._settings
        return self._local_step >= settings["local_steps"] or self._nominal_step >= settings["max_steps"]

    def _train(self) -> None:
        settings, began = self._settings, time.monotonic()
        time.sleep(settings.get("step_s", 0.0))
        self._weights = train_step(self._weights, self._target) + np.float32(settings.get("push", 0.0))
        self._local_step += 1
        self._step_s = time.monotonic() - began
        self._tokens += settings.get("tokens_per_step", 10)
        if settings.get("tells_loss"):
            self._loss = float(np.square(self._weights - self._target).mean())
        position = {"step": self._nominal_step, "local_step": self._local_step}
        self._link.send("progress", **position, tokens_per_s=1.0, step_s=self._step_s, loss=self._loss)

    def _hand_over(self) -> None:
        self._out[:] = self._weights
        step = self._nominal_step
        self._is_last = step >= self._settings["max_steps"]
        self._handed, self._tokens = self._tokens, 0
        weights = {"weights": self._out.tolist()} if self._settings.get("tells_weights") else {}
        self._record("ready", epoch=self._epoch, step=step, tokens=self._handed, **weights)
        self._link.send(
            "ready",
            fragment=0,
            epoch=self._epoch,
            local_step=self._local_step,
            tokens=self._handed,
            step=step,
            step_s=self._step_s,
            loss=self._loss,
            last=self._is_last,
        )

    def _ask(self, kind: str, **fields: Any) -> None:
        self._link.send(kind, **fields)
        answer = self._link.receive("committed", "ahead", "pending")
        match answer["kind"]:
            case "ahead":
                self._is_ahead, self._epoch, self._local_step = True, answer["epoch"], 0
            case "committed":
                self._take(answer)

    def _take(self, answer: dict[str, Any]) -> None:
        since = self._weights - self._out if self._is_ahead else np.float32(0)
        done = self._local_step if self._is_ahead and answer["epoch"] == self._epoch else 0
        if answer["world_rank"] not in answer["contributors"]:
            self._tokens += self._handed or 0
        self._weights, self._epoch = self._in + since, answer["epoch"]
        self._local_step, self._handed, self._is_ahead = max(answer["local_step"], done), None, False
        anchor = {"anchor": self._in.tolist()} if self._settings.get("tells_weights") else {}
        self._record("epoch", **answer, **anchor)
        self._is_over = self._is_last
        if self._settings.get("checkpoints") and not self._is_over:
            self._record(
                "checkpoint", failed=self._save(f"{self._settings['checkpoints']}/{self._epoch % 2}")
            )

    def _save(self, directory: str) -> str:
        """Have the daemon write its state. Returns why it could not; empty: it has."""
        self._link.send("snapshot", directory=directory)
        answer = self._link.receive("snapped", "failed")
        if answer["kind"] == "snapped":
            link = WorkerLink.connect(os.environ[LINK_ENV])
            link.send("written", directory=directory)
            answer = link.receive("checkpointed", "failed")
            link.close()
        return answer.get("reason", "")


class Recorder:
    """Appends records to a JSONL file, each in one write."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def __call__(self, what: str, **fields: Any) -> None:
        self._file.write(json.dumps({**fields, "kind": what, "time": time.time()}) + "\n")
        self._file.flush()


if __name__ == "__main__":
    LightWorker(json.loads(sys.argv[1])).run()
