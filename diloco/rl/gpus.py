"""Divides the GPUs between the trainer's ranks and its vLLM server, which share one only if the user says so."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.errors import UserError
from diloco.options.trainer import TrainConfig


def starts_server(config: TrainConfig) -> bool:
    """Whether this peer starts a vLLM server of its own."""
    grpo = config.grpo
    return config.mode == "grpo" and grpo.rollout == "vllm" and not grpo.rollout_url


def gpus_for_ranks(config: TrainConfig, num_gpus: int) -> int:
    """How many of a machine's GPUs are left for training."""
    return max(num_gpus - 1, 1) if num_gpus and starts_server(config) and config.device != "cpu" else num_gpus


def split_gpus(
    gpus: Sequence[str], *, num_ranks: int, server: str | None, starts_server: bool
) -> tuple[tuple[str, ...], str | None]:
    """The GPUs of the ranks, and the server's. Raises UserError if there are too few.

    `server` is the GPU that the user named, which the ranks may use too.
    """
    if not gpus:
        return (), None
    if not starts_server:
        return tuple(gpus[:num_ranks]), None
    if server is not None:
        others = [gpu for gpu in gpus if gpu != server] or list(gpus)
        return tuple(others[:num_ranks]), server
    if len(gpus) <= num_ranks:
        raise UserError(
            f"the vLLM server needs a GPU beside the {num_ranks} that train on, and {len(gpus)} are here; let them "
            f"share by --grpo.vllm-gpu {gpus[-1]} --grpo.vllm-args --gpu-memory-utilization 0.4, or name a server "
            "elsewhere with --rollout-url"
        )
    return tuple(gpus[:num_ranks]), gpus[-1]
