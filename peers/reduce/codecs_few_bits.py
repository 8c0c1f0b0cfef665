"""Codecs that give every value one or two bits, and every block one or two magnitudes: 1bit, 2bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from peers.reduce.codecs_common import LARGEST_SCALE, Codec, unusable_scale, with_slack
from peers.reduce.kernels import Bytes, Floats
from peers.reduce.kernels_few_bits import decode_one_bit, decode_two_bits, encode_one_bit, encode_two_bits

BLOCK_NUMEL = 512
_FLOAT_BYTES = 4


class FewBitsCodec(Codec):
    """Each value becomes one of its block's magnitudes, the means of those that they stand for, with its own sign.

        magnitudes: fp32 for each block, the smaller first | codes of all values          (little-endian)

    A block with NaN, an infinity or a mean beyond 2^64 has no magnitudes that a decoder takes. `encode_blocks` and
    `decode_blocks` are compiled loops (kernels_few_bits.py).
    """

    lossless = False
    divisible = False
    residual_reach = 1.0

    def __init__(
        self,
        name: str,
        *,
        num_magnitudes: int,
        values_per_byte: int,
        encode_blocks: Callable[[Floats, int, Floats, Bytes], None],
        decode_blocks: Callable[[Floats, Bytes, int, Floats], None],
    ) -> None:
        self.name = name
        self._values_per_byte, self._header_bytes = values_per_byte, _FLOAT_BYTES * num_magnitudes
        self._encode_blocks, self._decode_blocks = encode_blocks, decode_blocks

    def encoded_bytes(self, numel: int) -> int:
        rows, rest = divmod(numel, BLOCK_NUMEL)
        codes = rows * (BLOCK_NUMEL // self._values_per_byte) - (-rest // self._values_per_byte)
        return self._header_bytes * (rows + (rest > 0)) + codes

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        payload = buffer[: self.encoded_bytes(values.size)]
        self._encode_blocks(values, BLOCK_NUMEL, *self._parts(payload, values.size))
        return payload

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        magnitudes, codes = self._parts(payload, buffer.size)
        # One value that is NaN makes all magnitudes of its block NaN.
        if magnitudes.size and not (magnitudes.min() >= 0 and magnitudes.max() <= LARGEST_SCALE):
            raise unusable_scale()
        self._decode_blocks(magnitudes, codes, BLOCK_NUMEL, buffer)
        return buffer

    def energy_bound(self, norm: float, numel: int) -> float:
        # A mean's square is at most the mean of the squares, so no block gains energy.
        return with_slack(norm)

    def _parts(self, payload: Bytes, numel: int) -> tuple[Floats, Bytes]:
        split = self._header_bytes * -(-numel // BLOCK_NUMEL)
        return payload[:split].view(np.dtype("<f4")), payload[split:]


ONE_BIT = FewBitsCodec(
    "1bit", num_magnitudes=1, values_per_byte=8, encode_blocks=encode_one_bit, decode_blocks=decode_one_bit
)
"""Scaled signs: each value becomes its block's mean magnitude, with its own sign (EF-SignSGD, arXiv 1901.09847).

Given the signs, no magnitude loses less than the mean. Zero has its sign bit like any value: in a block of zeros it
stays zero, in others the residual takes back the next time what it has gained.
"""
TWO_BIT = FewBitsCodec(
    "2bit", num_magnitudes=2, values_per_byte=4, encode_blocks=encode_two_bits, decode_blocks=decode_two_bits
)
"""Statistical quantization: a block's values are put into two bins by magnitude, and each becomes the mean of its bin,
with its own sign.

Bins are divided where the best quantizer of a normal distribution divides them (Max, 1960): at 1.23 times the mean
magnitude. MuLoCo (arXiv 2505.23725) finds two bits enough for DiLoCo this way, and too few at even distances.
"""
