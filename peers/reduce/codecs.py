"""How fp32 values are encoded for the wire: all codecs by name.

A codec works on one chunk at a time and allocates next to nothing: the caller lends it a buffer, and each thread keeps
another for intermediate values. Encoding is a pure function of the values: an owner may encode one result once per
member and still send everyone the same bytes, and a member can compute after the round what its contribution lost.
"""

from __future__ import annotations

import torch

from peers.reduce.codecs_common import Codec
from peers.reduce.codecs_few_bits import ONE_BIT, TWO_BIT
from peers.reduce.codecs_float import Float32Codec, HalfCodec
from peers.reduce.codecs_integer import Int4Codec, IntegerCodec
from peers.reduce.codecs_topk import CONTRIBUTION_KEPT, RESULT_KEPT, TopKCodec

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
        raise ValueError(f"no codec is named {name!r}; there are {', '.join(_CODECS)}") from None


def result_codec_named(name: str) -> Codec:
    """The codec that goes with it for results: averages that owners send, and sums of a grid's collectors."""
    codec_named(name)
    return _RESULT_CODECS[name]
