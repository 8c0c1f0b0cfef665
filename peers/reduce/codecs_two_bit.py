"""The codec that gives every value two bits: its sign, and which of its block's two magnitudes is nearer."""

from __future__ import annotations

import numpy as np

from peers.reduce.codecs_common import LARGEST_SCALE, Codec, unusable_scale, with_slack
from peers.reduce.kernels import Bytes, Floats
from peers.reduce.kernels_two_bit import VALUES_PER_BYTE, decode_two_bits, encode_two_bits

BLOCK_NUMEL = 512
_LEVELS_BYTES = 8


class TwoBitCodec(Codec):
    """Statistical quantization: a block's values are put into bins, and each becomes the mean of its bin.

        levels: two fp32 for each block, the smaller first | codes of all blocks          (little-endian)

    Bins are divided where the best quantizer of a normal distribution divides them (Max, 1960): at 1.23 times the mean
    magnitude. MuLoCo (arXiv 2505.23725) finds two bits enough for DiLoCo this way, and too few at even distances.
    A block with NaN, an infinity or a mean beyond 2^64 has no levels that a decoder takes.
    """

    name = "2bit"
    lossless = False
    divisible = False
    residual_reach = 1.0

    def encoded_bytes(self, numel: int) -> int:
        rows, rest = divmod(numel, BLOCK_NUMEL)
        codes = rows * (BLOCK_NUMEL // VALUES_PER_BYTE) - (-rest // VALUES_PER_BYTE)
        return _LEVELS_BYTES * (rows + (rest > 0)) + codes

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        payload = buffer[: self.encoded_bytes(values.size)]
        encode_two_bits(values, BLOCK_NUMEL, *self._parts(payload, values.size))
        return payload

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        levels, codes = self._parts(payload, buffer.size)
        if levels.size and not (levels.min() >= 0 and levels.max() <= LARGEST_SCALE):
            # One that is NaN makes both of them NaN.
            raise unusable_scale()
        decode_two_bits(levels, codes, BLOCK_NUMEL, buffer)
        return buffer

    def energy_bound(self, norm: float, numel: int) -> float:
        # A mean's square is at most the mean of the squares, so no block gains energy.
        return with_slack(norm)

    def _parts(self, payload: Bytes, numel: int) -> tuple[Floats, Bytes]:
        split = _LEVELS_BYTES * -(-numel // BLOCK_NUMEL)
        return payload[:split].view(np.dtype("<f4")), payload[split:]
