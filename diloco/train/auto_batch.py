"""Finds the micro-batch size by timing forward and backward passes on the device, before training begins.

Throughput rises with the micro-batch size until memory is full. The search never runs out of memory, since a rank that
failed would leave the others waiting in a collective: it predicts the memory of each size from the smaller sizes.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.outer.world import in_group
from diloco.train.inner import InnerLoop
from diloco.train.memory import available_memory_bytes
from diloco.train.sharding import local_tensor

log = logging.getLogger(__name__)

MIN_SPEEDUP = 1.05
"""A larger size must be faster by this factor to be preferred: a smaller one leaves more memory free."""
MEMORY_FRACTION = 0.85
"""Fraction of the memory to use. Fragmentation, the optimizer's first step and the daemon's copies need the rest."""
_TIMED_PASSES = 3


def find_micro_batch_size(
    inner: InnerLoop, *, num_samples: int, seq_length: int, vocab_size: int, room_bytes: int | None = None
) -> int:
    """The divisor of `num_samples` (this rank's part of a batch) that fits and has the highest tokens per second.

    Runs forward and backward on random tokens; weights and random state are unchanged, gradients are cleared. A
    collective: all ranks get the same size. `room_bytes` is how much more memory may be used (default: measured).
    """
    sizes = [size for size in range(1, num_samples + 1) if num_samples % size == 0]
    room = _available_bytes(inner) if room_bytes is None else room_bytes
    devices = [inner.device] if inner.device.type == "cuda" else []
    best, best_rate = sizes[0], 0.0
    gradients = sum(_local_bytes(p) for p in inner.model.parameters() if p.requires_grad)
    base, predicted_per_sample = _peak_bytes(inner.device), 0.0
    with torch.random.fork_rng(devices=devices):
        for size in sizes:
            if not _all_agree(gradients + predicted_per_sample * size <= room, inner.device):
                break
            seconds, peak = _timed_and_peak(inner, torch.randint(vocab_size, (size, seq_length + 1)))
            predicted_per_sample = max(0, peak - base - gradients) / size
            rate = _min_over_ranks(size / seconds, inner.device)
            if rate > MIN_SPEEDUP * best_rate:
                best, best_rate = size, rate
            elif size >= 4 * best:
                break
    log.info("%d samples per forward pass: %.0f tokens/s", best, best_rate * seq_length)
    return best


def _timed_and_peak(inner: InnerLoop, samples: Tensor) -> tuple[float, int]:
    """Seconds for a forward and backward pass over these samples, and the peak memory in bytes."""

    def run() -> None:
        inner.loss(samples, reduction="mean").backward()

    if inner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(inner.device)
    # Warm-up: the first pass compiles, allocates and selects kernels.
    run()
    seconds = min(_timed(run, inner.device) for _ in range(_TIMED_PASSES))
    inner.optimizer.zero_grad()
    return seconds, _peak_bytes(inner.device)


def _timed(run: Callable[[], None], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _available_bytes(inner: InnerLoop) -> int:
    """Memory that activations may use: what is free, less what the optimizer will allocate in its first step."""
    parameters = [p for p in inner.model.parameters() if p.requires_grad]
    # AdamW's two moments have the parameters' sizes.
    moments = 0 if inner.optimizer.state else 2 * sum(_local_bytes(p) for p in parameters)
    if inner.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(inner.device)
        return int(free - (1 - MEMORY_FRACTION) * total) - moments
    available = available_memory_bytes()
    ranks = dist.get_world_size() if in_group() else 1
    return int(MEMORY_FRACTION * available / ranks) - moments if available is not None else 1 << 62


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # The kernel's high-water mark only rises; sizes are tried in ascending order.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _local_bytes(parameter: Tensor) -> int:
    local = local_tensor(parameter)
    return local.numel() * local.element_size()


def _min_over_ranks(rate: float, device: torch.device) -> float:
    """The minimum over all ranks, so that all take the same decision."""
    if not in_group():
        return rate
    least = torch.tensor(rate, dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return float(least)


def _all_agree(mine: bool, device: torch.device) -> bool:
    return _min_over_ranks(float(mine), device) == 1.0
