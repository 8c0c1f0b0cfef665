"""The codecs whose values remain floats: fp32, fp16 and bf16."""

from __future__ import annotations

import math

import numpy as np
import torch

from peers.reduce.codecs_common import Codec, with_slack
from peers.reduce.kernels import Bytes, Floats


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


class HalfCodec(Codec):
    """IEEE fp16, or bf16 (the upper half of fp32), rounded to nearest even; denormals are kept.

    Finite values beyond the largest saturate there instead of becoming infinite, so that one outlier costs its own
    precision and not the round; infinities saturate likewise, NaN stays NaN.

    What rounding changes at most: `relative_error` as a share of the value, `tiny_error` if the value is denormal.
    """

    lossless = False
    divisible = True
    residual_reach = 0.25

    def __init__(self, name: str, dtype: torch.dtype, *, relative_error: float, tiny_error: float) -> None:
        self.name = name
        self._dtype, self._largest = dtype, torch.finfo(dtype).max
        self._relative_error, self._tiny_error = relative_error, tiny_error

    def encoded_bytes(self, numel: int) -> int:
        return numel * 2

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        # By torch: NumPy has no bf16.
        payload = buffer[: values.size * 2]
        narrow = torch.from_numpy(payload.view(np.int16)).view(self._dtype)
        narrow.copy_(torch.from_numpy(values))
        # Clamping the result in place needs no further buffer of fp32 values.
        narrow.clamp_(-self._largest, self._largest)
        return payload

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        torch.from_numpy(buffer).copy_(torch.from_numpy(payload.view(np.int16)).view(self._dtype))
        return buffer

    def energy_bound(self, norm: float, numel: int) -> float:
        return with_slack(norm * (1 + self._relative_error) + math.sqrt(numel) * self._tiny_error)
