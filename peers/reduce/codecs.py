"""What a run of fp32 values looks like on the wire: all codecs by name, and those whose values remain floats.

A codec works on one chunk at a time and allocates next to nothing: the caller lends it a buffer, and each thread keeps
another for what lies between. Encoding is a pure function of the values, so that an owner may encode one result once
per member and still send everyone the same bytes, and a member can tell after the round what its contribution lost.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from peers.reduce.codecs_common import Codec, PseudoGradient, with_slack
from peers.reduce.codecs_few_bits import ONE_BIT, TWO_BIT
from peers.reduce.codecs_integer import Int4Codec, IntegerCodec
from peers.reduce.codecs_topk import CONTRIBUTION_KEPT, RESULT_KEPT, TopKCodec
from peers.reduce.kernels import Bytes, Floats

__all__ = ["Codec", "PseudoGradient", "codec_named", "codec_names", "result_codec_named"]


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

    `relative_error`, `tiny_error`: the most that rounding moves a value, as a share of it, and where it is denormal.
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
        # Values above the largest are few or none: one conversion and one in-place clamp spare a buffer of fp32 values.
        narrow.clamp_(-self._largest, self._largest)
        return payload

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        torch.from_numpy(buffer).copy_(torch.from_numpy(payload.view(np.int16)).view(self._dtype))
        return buffer

    def energy_bound(self, norm: float, numel: int) -> float:
        return with_slack(norm * (1 + self._relative_error) + math.sqrt(numel) * self._tiny_error)


_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Float32Codec(),
        # fp16's relative error is within the slack of every bound.
        HalfCodec("fp16", torch.float16, relative_error=0.0, tiny_error=2.0**-25),
        HalfCodec("bf16", torch.bfloat16, relative_error=2.0**-8, tiny_error=0.0),
        IntegerCodec("int8", top=127, block_numel=256, residual_reach=0.25),
        Int4Codec("int4", top=7, block_numel=128, residual_reach=1.0),
        TWO_BIT,
        ONE_BIT,
        TopKCodec(CONTRIBUTION_KEPT),
    )
}
_RESULT_CODECS: dict[str, Codec] = {**_CODECS, "topk": TopKCodec(RESULT_KEPT)}


def codec_named(name: str) -> Codec:
    """The codec of this name, for contributions. Raises ValueError with the names there are."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ValueError(f"no codec is named {name!r}; there are {', '.join(codec_names())}") from None


def result_codec_named(name: str) -> Codec:
    """The one that goes with it, for the averages that owners send."""
    codec_named(name)
    return _RESULT_CODECS[name]


def codec_names() -> tuple[str, ...]:
    return tuple(_CODECS)
