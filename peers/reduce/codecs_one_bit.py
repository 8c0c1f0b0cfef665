"""The codec that gives every value one bit, its sign, and every block its mean magnitude."""

from __future__ import annotations

import numpy as np

from peers.reduce.codecs_common import LARGEST_SCALE, Codec, unusable_scale, with_slack
from peers.reduce.kernels import Bytes, Floats
from peers.reduce.kernels_one_bit import VALUES_PER_BYTE, decode_one_bit, encode_one_bit

BLOCK_NUMEL = 512
_SCALE_BYTES = 4


class OneBitCodec(Codec):
    """Scaled signs: each value becomes its block's mean magnitude, with its own sign (EF-SignSGD, arXiv 1901.09847).

        scales: fp32 for each block | signs of all blocks, set where negative          (little-endian)

    Given the signs, no magnitude loses less than the mean. Zero has its sign bit like any value: in a block of zeros it
    stays zero, in others the residual takes back the next time what it has gained. A block with NaN, an infinity or a
    mean beyond 2^64 has no scale that a decoder takes.
    """

    name = "1bit"
    lossless = False
    divisible = False
    residual_reach = 1.0

    def encoded_bytes(self, numel: int) -> int:
        rows, rest = divmod(numel, BLOCK_NUMEL)
        signs = rows * (BLOCK_NUMEL // VALUES_PER_BYTE) - (-rest // VALUES_PER_BYTE)
        return _SCALE_BYTES * (rows + (rest > 0)) + signs

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        payload = buffer[: self.encoded_bytes(values.size)]
        encode_one_bit(values, BLOCK_NUMEL, *self._parts(payload, values.size))
        return payload

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        scales, signs = self._parts(payload, buffer.size)
        if scales.size and not (scales.min() >= 0 and scales.max() <= LARGEST_SCALE):
            raise unusable_scale()
        decode_one_bit(scales, signs, BLOCK_NUMEL, buffer)
        return buffer

    def energy_bound(self, norm: float, numel: int) -> float:
        # A mean's square is at most the mean of the squares, so no block gains energy.
        return with_slack(norm)

    def _parts(self, payload: Bytes, numel: int) -> tuple[Floats, Bytes]:
        split = _SCALE_BYTES * -(-numel // BLOCK_NUMEL)
        return payload[:split].view(np.dtype("<f4")), payload[split:]
