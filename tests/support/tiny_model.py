"""A model small enough for tests: two Llama layers, odd sizes so that shards are uneven."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.format_model import bare_model

VOCAB_SIZE = 37


def tiny_llama(*, tied: bool = False, seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=27,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def samples(num_samples: int, *, seq_length: int = 12, seed: int = 0) -> Tensor:
    """Token ids [num_samples, seq_length + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (num_samples, seq_length + 1), generator=generator)


def small_bare_model(directory: Path, **changes: object) -> Path:
    """The directory of a model without weights, and with one head, that samples in milliseconds."""
    heads = {"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    return bare_model(directory, **{**heads, **changes})
