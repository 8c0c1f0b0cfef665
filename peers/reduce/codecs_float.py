"""Codecs that give each value a float of its own: fp32, fp16, bf16."""

from __future__ import annotations

import math

import numpy as np
import torch

from peers.reduce.codecs_common import Codec, with_slack
from peers.reduce.kernels import Bytes, Floats

_FLOAT16_MAX = 65504.0
# Half of the smallest fp16 denormal: the most that rounding moves a value too small for relative precision.
_FLOAT16_MAX_TINY_ERROR = 2.0**-25
_BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
_BFLOAT16_RELATIVE_ERROR = 2.0**-8


class Float32Codec(Codec):
    """The values as they are, little-endian."""

    name = "fp32"
    lossless = True
    divisible = True
    residual_reach = 0.0

    def encoded_bytes(self, numel: int) -> int:
        return numel * 4

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        return values.view(np.uint8)

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        return payload.view(np.float32)

    def energy_bound(self, norm: float, numel: int) -> float:
        return with_slack(norm)


class Float16Codec(Codec):
    """IEEE half precision, rounded to nearest even; denormals are kept.

    Finite values beyond ±65504 saturate there instead of becoming infinite, so that one outlier costs its own
    precision and not the round; infinities saturate likewise, NaN stays NaN.
    """

    name = "fp16"
    lossless = False
    divisible = True
    residual_reach = 0.25

    def encoded_bytes(self, numel: int) -> int:
        return numel * 2

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        return _narrowed(values, buffer, torch.float16, _FLOAT16_MAX)

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        return _widened(payload, buffer, torch.float16)

    def energy_bound(self, norm: float, numel: int) -> float:
        return with_slack(norm + math.sqrt(numel) * _FLOAT16_MAX_TINY_ERROR)


class BFloat16Codec(Codec):
    """The upper half of fp32, rounded to nearest even: its whole range, denormals included, and 8 bits of precision.

    Values that would round to infinity, and infinities, saturate at ±3.39e38; NaN stays NaN.
    """

    name = "bf16"
    lossless = False
    divisible = True
    residual_reach = 0.25

    def encoded_bytes(self, numel: int) -> int:
        return numel * 2

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        return _narrowed(values, buffer, torch.bfloat16, _BFLOAT16_MAX)

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        return _widened(payload, buffer, torch.bfloat16)

    def energy_bound(self, norm: float, numel: int) -> float:
        return with_slack(norm * (1 + _BFLOAT16_RELATIVE_ERROR))


def _narrowed(values: Floats, buffer: Bytes, dtype: torch.dtype, largest: float) -> Bytes:
    # NumPy has no bf16.
    payload = buffer[: values.size * dtype.itemsize]
    narrow = torch.from_numpy(payload.view(np.int16)).view(dtype)
    narrow.copy_(torch.from_numpy(values))
    # Values above the largest are few or none: one conversion and one in-place clamp spare a buffer of fp32 values.
    narrow.clamp_(-largest, largest)
    return payload


def _widened(payload: Bytes, buffer: Floats, dtype: torch.dtype) -> Floats:
    torch.from_numpy(buffer).copy_(torch.from_numpy(payload.view(np.int16)).view(dtype))
    return buffer
