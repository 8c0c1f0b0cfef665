"""Estimates the duration of a training step on this machine from the speed of its matrix products."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from diloco.doctor.findings import Finding, passed, warned
from diloco.options.model_files import load_model_config
from diloco.options.trainer import TrainConfig
from diloco.sim.cost.scenario import step_seconds
from diloco.train.model import num_parameters
from peers.monitor.figures import short_figure, span

LONG_EPOCH_S = 1200.0
"""A longer epoch is probably not intended, so it is a warning."""
_MFU = 0.5
"""The fraction of the speed of large matrix products that training reaches at best on CPUs."""
_MEASURED_S = 0.5
"""The fastest product in this time counts, since other programs use the cores now and then."""


def check_speed(config: TrainConfig, num_ranks: int, *, num_peers: int = 1) -> Iterator[Finding]:
    """Estimate the duration of a step and an epoch of this configuration. Multiplies matrices for a fraction of a
    second on one device. Ranks have a GPU each, or share the cores, as do the peers on this machine.
    """
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    flops = flops_of(torch.device("cuda" if on_gpu else "cpu")) * (num_ranks if on_gpu else 1 / num_peers)
    tokens = config.total_batch_size * config.seq_length
    weights = num_parameters(load_model_config(config.path_model))
    step_s = step_seconds(weights, tokens, flops, _MFU)
    epoch_s = step_s * config.hv.steps_per_epoch
    message = (
        f"at most {short_figure(tokens / step_s)} tokens/s: an epoch of "
        f"{config.hv.steps_per_epoch} steps takes {span(epoch_s)} or more, all {config.end_step} steps "
        f"{span(step_s * config.end_step)}"
    )
    if epoch_s > LONG_EPOCH_S:
        yield warned(
            "speed", message, "--path-model 2m  # or smaller --total-batch-size and --hv.local-steps"
        )
    else:
        yield passed("speed", message)


def flops_of(device: torch.device) -> float:
    """FLOP/s of matrix products, in bf16 on a GPU and in fp32 on the CPU."""
    size, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    fastest_s = float("inf")
    deadline = time.perf_counter() + _MEASURED_S
    while time.perf_counter() < deadline:
        began_at = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        fastest_s = min(fastest_s, time.perf_counter() - began_at)
    return 2 * size**3 / fastest_s
