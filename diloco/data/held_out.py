"""Held-out text for evaluation: its windows of tokens and its size in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diloco.data.token_files import Tokens
from diloco.data.tokenizer import is_byte_level, text_byte_counts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Validation:
    """Held-out windows, the same on every peer and at every evaluation of a run."""

    windows: np.ndarray
    """int64 [num_windows, seq_length + 1]."""
    num_bytes: int
    """UTF-8 bytes of the predicted ids, windows[:, 1:]."""
    byte_frequency_bits: float
    """Bits per byte of a unigram model of bytes, fitted to a sample of the training text: a baseline."""

    def bits_per_byte(self, total_nats: float) -> float:
        """Bits per byte of a model whose cross-entropy over all predicted ids sums to `total_nats`."""
        return total_nats / math.log(2) / self.num_bytes


def validation_of(
    tokens: Tokens,
    train_byte_counts: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_length: int,
    max_tokens: int,
) -> Validation:
    """Windows spread evenly over the held-out ids, with at most `max_tokens` predicted ids but at least one window."""
    windows = windows_among(tokens, seq_length, max_tokens=max_tokens)
    byte_counts = text_byte_counts(tokenizer, windows[:, 1:].ravel(), byte_level=is_byte_level(tokenizer))
    bits = cross_entropy_bits(byte_counts, train_byte_counts)
    return Validation(windows, max(1, int(byte_counts.sum())), bits)


def windows_among(tokens: Tokens, seq_length: int, *, max_tokens: int) -> np.ndarray:
    """Windows spread evenly over `tokens`, int64 [num_windows, seq_length + 1]; neighbours share one id at most."""
    available = (len(tokens) - 1) // seq_length
    num_windows = max(1, min(available, max_tokens // seq_length))
    return windows_at(np.arange(num_windows) * available // num_windows, tokens, seq_length)


def windows_at(numbers: np.ndarray, tokens: Tokens, seq_length: int) -> np.ndarray:
    """Windows by their number in the text, int64 [len(numbers), seq_length + 1]."""
    windows = np.empty((len(numbers), seq_length + 1), dtype=np.int64)
    for window, first in zip(windows, numbers.tolist(), strict=True):
        window[:] = np.asarray(tokens[first * seq_length : (first + 1) * seq_length + 1])
    return windows


def cross_entropy_bits(counts: np.ndarray, model_counts: np.ndarray) -> float:
    """Bits per byte of text with byte counts int64 [256] under a unigram model of `model_counts`, smoothed by one."""
    smoothed = (model_counts + 1) / (model_counts + 1).sum()
    return float(-(counts * np.log2(smoothed)).sum() / max(1, counts.sum()))
