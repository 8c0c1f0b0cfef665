"""Codecs applied to tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from peers.reduce.codecs_common import Codec


def encode(codec: Codec, values: Tensor) -> Tensor:
    """The payload, in memory of its own."""
    # Longer than needed: a codec uses the first bytes of its buffer.
    buffer = torch.full((codec.encoded_bytes(values.numel()) + 8,), 85, dtype=torch.uint8)
    payload = torch.from_numpy(codec.encode(values.numpy(), buffer.numpy()))
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.encoded_bytes(values.numel())
    return payload.clone()


def decode(codec: Codec, payload: Tensor, numel: int) -> Tensor:
    """The `numel` values that the payload encodes."""
    return torch.from_numpy(codec.decode(payload.numpy(), torch.full((numel,), torch.nan).numpy()))


def coded(codec: Codec, values: Tensor) -> Tensor:
    """The values after encoding and decoding."""
    return decode(codec, encode(codec, values), values.numel())
