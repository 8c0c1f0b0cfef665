"""Evaluates the model on held-out text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from diloco.data.held_out import Validation
from diloco.outer.world import World, in_group, on_rank_zero
from diloco.train.inner import InnerLoop

_TIMED_WINDOWS = 4


@dataclass(frozen=True)
class Evaluation:
    """`loss` is in nats per token."""

    loss: float
    bits_per_byte: float


@torch.no_grad()
def seconds_to_evaluate(
    inner: InnerLoop, validation: Validation, *, world: World, micro_batch_size: int
) -> float:
    """How long `evaluate` will take, by forward passes of a few windows. A collective."""
    num_windows = -(-len(validation.windows) // world.num_ranks)
    inner.model.eval()
    # Only the last pass counts: the first also loads and compiles kernels. A large one may take minutes on a CPU.
    for size in (1, 1, min(_TIMED_WINDOWS, micro_batch_size, len(validation.windows))):
        windows = torch.from_numpy(validation.windows[:size])
        began_at = time.perf_counter()
        float(inner.loss(windows, reduction="sum"))
        seconds = (time.perf_counter() - began_at) / size
    inner.model.train()
    return on_rank_zero(lambda: seconds * num_windows)


@torch.no_grad()
def evaluate(
    inner: InnerLoop,
    validation: Validation,
    *,
    world: World,
    micro_batch_size: int,
    on_scored: Callable[[float], None] = lambda _num_windows: None,
) -> Evaluation:
    """Score all held-out windows, each on one rank. A collective: all ranks must call it.

    `on_scored` is called with the number of windows scored so far.
    """
    windows = torch.from_numpy(validation.windows)
    # FSDP ranks must run equally many forward passes: a rank without windows scores one and discards the result.
    num_rounds = -(-len(windows) // (micro_batch_size * world.num_ranks))
    total = torch.zeros((), dtype=torch.float64)
    inner.model.eval()
    for number in range(num_rounds):
        start = (number * world.num_ranks + world.rank) * micro_batch_size
        mine = windows[start : start + micro_batch_size]
        nats = inner.loss(mine if len(mine) else windows[:1], reduction="sum")
        total += nats.double().cpu() * bool(len(mine))
        on_scored(min((number + 1) * world.num_ranks * micro_batch_size, len(windows)))
    inner.model.train()
    if in_group():
        dist.all_reduce(total)
    nats_in_all = float(total)
    num_tokens = windows.shape[0] * (windows.shape[1] - 1)
    return Evaluation(nats_in_all / num_tokens, validation.bits_per_byte(nats_in_all))
