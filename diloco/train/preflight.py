"""Checks that a training fits the machine before anything is started or allocated. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.options.model_files import load_model_config
from diloco.train.memory import check_memory, memory_needed_bytes, number_in


def check_peers_fit(
    path_model: str,
    *,
    num_peers: int = 1,
    on_gpu: bool,
    activation_tokens: int = 0,
    gpu_bytes: int | None = None,
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
        on_gpu=on_gpu,
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
