"""Compares an estimate of the memory that training needs with what machine and container have free. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from diloco.errors import UserError
from diloco.options.model_files import load_model_config
from peers.protocol.codecs import BITS_BY_CODEC, FLOAT_BYTES, CodecName
from peers.system import available_memory_bytes

Optimizer = Literal["adamw", "muon"]

# In the worker: fp32 weights, gradients, and AdamW's two moments or Muon's one.
_WORKER_BYTES_PER_PARAMETER: Mapping[Optimizer, int] = {"adamw": 16, "muon": 12}
# In host memory, from the first checkpoint on: what it is written from, weights and the optimizer's moments.
_COPY_BYTES_PER_PARAMETER: Mapping[Optimizer, int] = {"adamw": 12, "muon": 8}
# In host memory, worker and daemon together: the outgoing and incoming buffers, anchor and momentum, all fp32.
_SWARM_BYTES_PER_PARAMETER = 16
# In host memory, and in a checkpoint: what a lossy codec has kept back of this peer's contributions. What it has kept
# back of the results is left out: it is divided among the peers, whose number is not known.
_RESIDUAL_BYTES_PER_PARAMETER = 4
# In host memory, in the daemon: anchor and momentum that a checkpoint is still written from when a commit comes, which
# then writes to other memory; so it is with the residuals.
_HELD_BYTES_PER_PARAMETER = 8
_FROZEN_BYTES_PER_PARAMETER = 4
"""For the frozen weights of a model with adapters, which are not averaged."""
_GIB = 2**30
_FEWER_TOKENS = (
    "a smaller --per-device-train-batch-size, a shorter --seq-length, or --activation-checkpointing"
)


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes that one peer needs for training, summed over its ranks on one machine."""

    host_bytes: int
    device_bytes: int
    """Summed over its GPUs; 0 if it trains on the CPU."""
    activation_bytes: int = 0
    """The part of `device_bytes`, or of `host_bytes` on the CPU, that depends on batch size and sequence length."""
    copy_bytes: int = 0
    """The part of `host_bytes` that --ckpt.interval adds."""
    is_sharded: bool = True
    """Whether its ranks share one copy of the model, so that more GPUs help."""


def memory_needed_bytes(
    num_parameters: int,
    *,
    activation_tokens: int,
    config: Mapping[str, Any],
    optimizer: Optimizer = "adamw",
    on_gpu: bool = False,
    in_swarm: bool = True,
    has_adapters: bool = False,
    recomputes: bool = False,
    copies_state: bool = False,
    compression: CodecName = "fp32",
    num_copies: int | None = None,
) -> MemoryNeed:
    """Estimate for one peer; `activation_tokens` = samples per forward pass × sequence length × ranks on this machine.

    `recomputes` is --activation-checkpointing, `compression` is --hv.compression, `copies_state` that of the
    configuration. `num_copies` is how many ranks here hold the whole model each; None: they share it.

    The estimate is a lower bound, so that nothing that could run is refused: weights and optimizer state are exact,
    activations are underestimated, and adapters, which are trained in place of the weights, are not counted. But with
    `copies_state` it expects a commit while a checkpoint is being written: sooner or later there is one.
    """
    activations = activation_tokens * _activation_bytes_per_token(config, recomputes=recomputes)
    per_parameter = _FROZEN_BYTES_PER_PARAMETER if has_adapters else _WORKER_BYTES_PER_PARAMETER[optimizer]
    worker = num_parameters * per_parameter * (num_copies or 1) + activations
    per_parameter = _SWARM_BYTES_PER_PARAMETER + residual_bytes_per_parameter(compression)
    swarm = num_parameters * per_parameter if in_swarm and not has_adapters else 0
    # Whole weights are copied once per peer, by the rank that holds the first replica.
    copies = num_parameters * _COPY_BYTES_PER_PARAMETER[optimizer] if copies_state else 0
    if copies_state and swarm:
        copies += num_parameters * (_HELD_BYTES_PER_PARAMETER + residual_bytes_per_parameter(compression))
    return MemoryNeed(
        host_bytes=copies + (swarm if on_gpu else worker + swarm),
        device_bytes=worker if on_gpu else 0,
        activation_bytes=activations,
        copy_bytes=copies,
        is_sharded=num_copies is None,
    )


def residual_bytes_per_parameter(compression: CodecName) -> int:
    """A lower bound of the error feedback of --hv.compression."""
    return _RESIDUAL_BYTES_PER_PARAMETER if BITS_BY_CODEC[compression] < 8 * FLOAT_BYTES else 0


def check_memory(
    need: MemoryNeed,
    *,
    path_model: str,
    num_peers: int = 1,
    available: int | None = None,
    device_available: int | None = None,
) -> None:
    """Raise UserError if host or GPUs lack memory for `num_peers` such peers. Unknown free memory passes."""
    if device_available is not None and need.device_bytes > device_available:
        has_room_for_model = need.device_bytes - need.activation_bytes <= device_available
        gpus = "more GPUs" if need.is_sharded else "GPUs with more memory, since each holds all of it"
        raise UserError(
            f"training {path_model} needs about {need.device_bytes / _GIB:.1f} GiB of GPU memory, "
            f"{device_available / _GIB:.1f} GiB are free; take "
            f"{_FEWER_TOKENS if has_room_for_model else f'a smaller model or {gpus}'}"
        )
    available = available_memory_bytes() if available is None else available
    wanted = need.host_bytes * num_peers
    if available is not None and wanted > available:
        peers = "" if num_peers == 1 else f" for {num_peers} peers"
        activations = 0 if need.device_bytes else need.activation_bytes
        advice = "a smaller model"
        if wanted - activations * num_peers <= available:
            advice = _FEWER_TOKENS
        elif wanted - need.copy_bytes * num_peers <= available:
            advice = "a smaller model, or no checkpoints (--ckpt.interval)"
        fewer_peers = ", or fewer peers here" if need.host_bytes <= available else ""
        raise UserError(
            f"training {path_model} needs about {wanted / _GIB:.1f} GiB of memory{peers}, "
            f"{available / _GIB:.1f} GiB are free; take {advice}{fewer_peers}"
        )


def _activation_bytes_per_token(config: Mapping[str, Any], *, recomputes: bool) -> int:
    """A lower bound: 16 values of the hidden size per layer, 2 bytes each, plus fp32 logits and their gradient.

    With activation checkpointing each layer keeps its input only, except the one that is being recomputed.
    """
    hidden = number_in(config, "hidden_size", "n_embd")
    layers = number_in(config, "num_hidden_layers", "n_layer")
    values = layers + 16 if recomputes else layers * 16
    return hidden * values * 2 + number_in(config, "vocab_size") * 8


def number_in(config: Mapping[str, Any], *names: str) -> int:
    """The first of these fields of a config.json that is a positive integer, else 0: some models have lists there."""
    values = (config.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def check_peers_fit(
    path_model: str,
    *,
    num_peers: int = 1,
    on_gpu: bool,
    activation_tokens: int = 0,
    gpu_bytes: int | None = None,
    optimizer: Optimizer,
    has_adapters: bool = False,
    recomputes: bool = False,
    copies_state: bool = False,
    compression: CodecName = "fp32",
    num_copies: int | None = None,
) -> None:
    """Raise UserError if the model is invalid, or if `num_peers` peers training it do not fit this machine.

    Uses a lower bound of the parameter count: an exact count needs torch, and the worker makes one later.
    `activation_tokens` is per peer, 0 if the batch size is not known until the swarm tells it. `gpu_bytes` is the
    memory of one peer's GPUs together.
    """
    model = load_model_config(path_model)
    need = memory_needed_bytes(
        least_num_parameters(model),
        activation_tokens=activation_tokens,
        config=model,
        optimizer=optimizer,
        on_gpu=on_gpu,
        has_adapters=has_adapters,
        recomputes=recomputes,
        copies_state=copies_state,
        compression=compression,
        num_copies=num_copies,
    )
    check_memory(need, path_model=path_model, num_peers=num_peers, device_available=gpu_bytes)


def least_num_parameters(config: Mapping[str, Any]) -> int:
    """Counts embeddings and, per layer, attention and two MLP matrices; 0 for those whose config fields are missing."""
    tables = 2 if config.get("tie_word_embeddings") is False else 1
    hidden = number_in(config, "hidden_size", "n_embd")
    layers = number_in(config, "num_hidden_layers", "n_layer")
    heads = number_in(config, "num_attention_heads", "n_head")
    head_dim = number_in(config, "head_dim") or (hidden // heads if heads else 0)
    kv_heads = number_in(config, "num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    mlp = 2 * hidden * number_in(config, "intermediate_size", "n_inner")
    return tables * number_in(config, "vocab_size") * hidden + layers * (attention + mlp)
