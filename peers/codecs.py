"""What a run of fp32 values looks like on the wire.

A codec works on one chunk at a time and allocates nothing: the caller lends it a buffer. Encoding is a pure function
of the values, so that an owner may encode one result once per member and still send everyone the same bytes.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

_FLOAT32_BYTES = 4
_FLOAT16_BYTES = 2
_FLOAT16_MAX = 65504.0
# Half of the smallest fp16 denormal: the most that rounding moves a value too small for relative precision.
_FLOAT16_MAX_TINY_ERROR = 2.0**-25


class Codec(Protocol):
    """Values are flat contiguous fp32 tensors, payloads flat contiguous uint8 tensors, both on the CPU."""

    name: str
    lossless: bool

    def encoded_bytes(self, numel: int) -> int:
        """Exact payload size of `numel` values."""
        ...

    def encode(self, values: Tensor, buffer: Tensor) -> Tensor:
        """The payload of `values`: a view of `values` itself, or of `buffer` (at least `encoded_bytes` long)."""
        ...

    def decode(self, payload: Tensor, buffer: Tensor) -> Tensor:
        """The values in `payload`: a view of `payload` itself, or of the fp32 `buffer`, `buffer.numel()` long."""
        ...

    def energy_bound(self, norm: float, numel: int) -> float:
        """The most that the squares of decoded values may sum to, if `numel` values of this L2 norm were encoded."""
        ...


class Float32Codec:
    """The values as they are, little-endian."""

    name = "fp32"
    lossless = True

    def encoded_bytes(self, numel: int) -> int:
        return numel * _FLOAT32_BYTES

    def encode(self, values: Tensor, buffer: Tensor) -> Tensor:
        return values.view(torch.uint8)

    def decode(self, payload: Tensor, buffer: Tensor) -> Tensor:
        return payload.view(torch.float32)

    def energy_bound(self, norm: float, numel: int) -> float:
        return _with_slack(norm)


class Float16Codec:
    """IEEE half precision, rounded to nearest even; denormals are kept.

    Finite values beyond ±65504 saturate there instead of becoming infinite, so that one outlier costs its own
    precision and not the round; infinities saturate likewise, NaN stays NaN.
    """

    name = "fp16"
    lossless = False

    def encoded_bytes(self, numel: int) -> int:
        return numel * _FLOAT16_BYTES

    def encode(self, values: Tensor, buffer: Tensor) -> Tensor:
        payload = buffer[: self.encoded_bytes(values.numel())]
        halves = payload.view(torch.float16)
        halves.copy_(values)
        # Values above 65504 are few or none: one conversion and one in-place clamp spare a buffer of fp32 values.
        halves.clamp_(-_FLOAT16_MAX, _FLOAT16_MAX)
        return payload

    def decode(self, payload: Tensor, buffer: Tensor) -> Tensor:
        return buffer.copy_(payload.view(torch.float16))

    def energy_bound(self, norm: float, numel: int) -> float:
        return _with_slack(norm + math.sqrt(numel) * _FLOAT16_MAX_TINY_ERROR)


def _with_slack(norm: float) -> float:
    # 1e-3 covers fp16's relative rounding (2^-11 of each value) and sums taken in another order on another machine.
    return norm * norm * (1 + 1e-3) + 1e-30


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32Codec(), Float16Codec())}


def codec_named(name: str) -> Codec:
    """The codec of this name. Raises ValueError with the names there are."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ValueError(f"no codec is named {name!r}; there are {', '.join(codec_names())}") from None


def codec_names() -> tuple[str, ...]:
    return tuple(_CODECS)
