"""A training loop of known cost around `Diloco(model)`, to measure the overhead of averaging.

    diloco peer ... --worker "python -m benchmarks.light_loop '{\"numel\": 1000000, ...}'"

The model has one flat parameter per layer. An inner step adds noise of this peer to the weights, so that there is
something to average, computes a fixed number of small matrix products, and then sleeps, as if it waited for a device.
Writes records to a JSONL file, at the start and for each commit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from diloco.outer.diloco import Diloco

_ROW = 1 << 16
_MATRIX = 128
_GATE_POLL_S = 0.02
"""Not shorter: tens of loops may wait on one machine."""
_GATE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Paced:
    """The settings that a swarm (swarm_harness.py) passes to the loop of each peer."""

    wait_s: float = 0.0
    """Seconds that a step sleeps after it has computed."""
    history: str = ""
    """Path of the JSONL file."""
    gate: str = ""
    """Path of a file with the number of the last epoch that may end; empty: no limit."""


@dataclass(frozen=True, kw_only=True)
class Loop(Paced):
    """The size of the model and the cost of a step."""

    numel: int
    """Total number of fp32 weights."""
    num_layers: int = 1
    num_products: int = 0
    """Matrix products per step, which take CPU time."""
    move_parts: int = 1
    """A step changes one of this many parts of the weights, in turns."""
    max_epochs: int = 3
    num_steps: int = 0
    """If not 0, trains without a swarm for this many steps."""
    record_steps: int = 0
    """Without a swarm, steps between two records."""


def main(loop: Loop) -> None:
    torch.set_num_threads(1)
    with Path(loop.history).open("a", encoding="utf-8") as history:

        def record(kind: str, **fields: object) -> None:
            history.write(json.dumps({**fields, "kind": kind, "time": time.monotonic()}) + "\n")
            history.flush()

        if loop.num_steps:
            train_alone(loop, record)
        else:
            train_in_swarm(loop, record)


def train_alone(loop: Loop, record: Callable[..., None]) -> None:
    step = Step(loop, model_of(loop), rank=0)
    record("start")
    for number in range(1, loop.num_steps + 1):
        step()
        if number % loop.record_steps == 0:
            record("steps", step=number)
    record("end", step=loop.num_steps)


def train_in_swarm(loop: Loop, record: Callable[..., None]) -> None:
    model = model_of(loop)
    # A worker that goes ahead would wait at the gate before it has seen the commit for which the gate was opened.
    outer = Diloco(model, goes_ahead=not loop.gate)
    step, number = Step(loop, model, rank=outer.world_rank or 0), 0
    record("start", epoch=outer.epoch, world_rank=outer.world_rank)
    while outer.epoch < loop.max_epochs:
        step()
        number += 1
        if loop.gate and outer.local_step == 0:
            wait_for_gate(Path(loop.gate), outer.epoch + 1)
        commit = outer.step(num_tokens=1)
        if commit is not None:
            record("epoch", step=number, **asdict(commit))
    record("end", step=number)
    outer.finish()


def model_of(loop: Loop) -> nn.Module:
    sizes = [loop.numel // loop.num_layers] * loop.num_layers
    sizes[0] += loop.numel - sum(sizes)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ParameterList([torch.zeros(size)]) for size in sizes])})


class Step:
    """One inner step."""

    def __init__(self, loop: Loop, model: nn.Module, *, rank: int) -> None:
        self._loop, self._number = loop, 0
        self._rows = [row for parameter in model.parameters() for row in parameter.data.split(_ROW)]
        self._generator = torch.Generator().manual_seed(rank)
        # Noise for one row only, reused with random factors: drawing it for every weight would dominate the step.
        self._noise = 1e-3 * torch.randn(_ROW, generator=self._generator)
        self._matrix = torch.randn(_MATRIX, _MATRIX, generator=self._generator)
        self._product = torch.empty(_MATRIX, _MATRIX)

    def __call__(self) -> None:
        self._number += 1
        for row in self._rows[self._number % self._loop.move_parts :: self._loop.move_parts]:
            factor = 0.5 + float(torch.rand((), generator=self._generator))
            row.add_(self._noise[: row.numel()], alpha=factor)
        self.compute(self._loop.num_products)
        time.sleep(self._loop.wait_s)

    def compute(self, num_products: int) -> None:
        for _ in range(num_products):
            torch.mm(self._matrix, self._matrix, out=self._product)


def products_per_second() -> float:
    """Matrix products per second on an idle core, the best of several measurements."""
    torch.set_num_threads(1)
    step, best, tried = Step(Loop(numel=1), model_of(Loop(numel=1)), rank=0), 0.0, 500
    for _ in range(20):
        started_at = time.perf_counter()
        step.compute(tried)
        best = max(best, tried / (time.perf_counter() - started_at))
    return best


def wait_for_gate(path: Path, epoch: int) -> None:
    deadline = time.monotonic() + _GATE_TIMEOUT_S
    while int(path.read_text()) < epoch:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody opened the gate to epoch {epoch} in {_GATE_TIMEOUT_S:g} s")
        time.sleep(_GATE_POLL_S)


if __name__ == "__main__":
    main(Loop(**json.loads(sys.argv[1])))
