"""A training loop of known cost around `Diloco(model)`, for measuring what averaging adds to it.

    diloco peer ... --worker "python -m benchmarks.light_loop '{\"numel\": 1000000, ...}'"

The model is flat parameters, one a layer. Once an epoch every weight moves by noise of this peer's own, so there is
something to average; an inner step is a fixed number of products of small matrices, then a wait, as for a device that
does the rest. What happens is written to a JSONL file, a record for the start and each commit.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from diloco.outer import Commit, Diloco

_ROW = 1 << 16
_MATRIX = 128
_GATE_POLL_S = 0.005
_GATE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What is trained, and what a step costs."""

    numel: int
    """Weights in all, fp32."""
    num_layers: int = 1
    num_products: int = 0
    """Matrix products in a step: processor time."""
    wait_s: float = 0.0
    """What a step waits besides."""
    max_epochs: int = 3
    averages: bool = True
    """Off: the same steps without a swarm."""
    num_steps: int = 0
    """Steps to take without a swarm."""
    history: str = ""
    """The JSONL file."""
    gate: str = ""
    """A file with a number: no epoch ends that is higher. None: no such limit."""


def main(loop: Loop) -> None:
    torch.set_num_threads(1)
    model = model_of(loop)
    step = Step(loop)
    with Path(loop.history).open("a", encoding="utf-8") as history:

        def record(kind: str, **fields: object) -> None:
            history.write(json.dumps({**fields, "kind": kind, "time": time.monotonic()}) + "\n")
            history.flush()

        if not loop.averages:
            record("start")
            for _ in range(loop.num_steps):
                step()
            record("end", step=loop.num_steps)
            return
        outer = Diloco(model)
        record("start", epoch=outer.epoch, world_rank=outer.world_rank)
        step_number = 0
        while outer.epoch < loop.max_epochs:
            if outer.local_step == 0:
                move(model, seed=1000 * (outer.world_rank or 0) + outer.epoch)
            step()
            step_number += 1
            # The step that may hand the weights over, with overlap or without.
            if loop.gate and outer.local_step == 0:
                wait_for_gate(Path(loop.gate), outer.epoch + 1)
            commit: Commit | None = outer.step(num_tokens=1)
            if commit is not None:
                record("epoch", step=step_number, **asdict(commit))
        record("end", step=step_number)
        # No further average: what the last epochs had is what is measured.
        sys.stdout.flush()
        outer.finish()


def model_of(loop: Loop) -> nn.Module:
    sizes = [loop.numel // loop.num_layers] * loop.num_layers
    sizes[0] += loop.numel - sum(sizes)
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ParameterList([torch.zeros(size)]) for size in sizes])})


def move(model: nn.Module, *, seed: int) -> None:
    """Add noise to every weight, different for each seed, in a fraction of the time that drawing it all would take."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(_ROW, generator=generator) * 1e-3
    for parameter in model.parameters():
        for row in parameter.data.split(_ROW):
            row.add_(noise[: row.numel()], alpha=float(torch.rand((), generator=generator)) + 0.5)


class Step:
    """One inner step."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._a, self._b = torch.randn(_MATRIX, _MATRIX), torch.randn(_MATRIX, _MATRIX)
        self._out = torch.empty(_MATRIX, _MATRIX)

    def __call__(self) -> Tensor:
        for _ in range(self._loop.num_products):
            torch.mm(self._a, self._b, out=self._out)
        time.sleep(self._loop.wait_s)
        return self._out


def wait_for_gate(path: Path, epoch: int) -> None:
    deadline = time.monotonic() + _GATE_TIMEOUT_S
    while int(path.read_text()) < epoch:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody opened the gate to epoch {epoch} in {_GATE_TIMEOUT_S:g} s")
        time.sleep(_GATE_POLL_S)


if __name__ == "__main__":
    main(Loop(**json.loads(sys.argv[1])))
