"""Codecs that give every value one or two bits, and every block one or two magnitudes: 1bit, 2bit."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from peers.reduce.codecs_common import LARGEST_SCALE, Codec, unusable_scale, with_slack
from peers.reduce.kernels import Bytes, Floats
from peers.reduce.kernels_few_bits import decode_one_bit, decode_two_bits, encode_one_bit, encode_two_bits

BLOCK_NUMEL = 512
_FLOAT_BYTES = 4


class FewBitsCodec(Codec):
    """Each value becomes one of its block's magnitudes, the means of those that they stand for, with its own sign.

        magnitudes: fp32 for each block | codes of all values          (little-endian)

    A block with NaN, an infinity or a mean beyond 2^64 has no magnitudes that a decoder takes.
    """

    lossless = False
    divisible = False
    residual_reach = 1.0
    num_magnitudes: ClassVar[int]
    """Of one block."""
    values_per_byte: ClassVar[int]

    def encoded_bytes(self, numel: int) -> int:
        rows, rest = divmod(numel, BLOCK_NUMEL)
        codes = rows * (BLOCK_NUMEL // self.values_per_byte) - (-rest // self.values_per_byte)
        return _FLOAT_BYTES * self.num_magnitudes * (rows + (rest > 0)) + codes

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        payload = buffer[: self.encoded_bytes(values.size)]
        self._encode_blocks(values, *self._parts(payload, values.size))
        return payload

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        magnitudes, codes = self._parts(payload, buffer.size)
        # One value that is NaN makes all magnitudes of its block NaN.
        if magnitudes.size and not (magnitudes.min() >= 0 and magnitudes.max() <= LARGEST_SCALE):
            raise unusable_scale()
        self._decode_blocks(magnitudes, codes, buffer)
        return buffer

    def energy_bound(self, norm: float, numel: int) -> float:
        # A mean's square is at most the mean of the squares, so no block gains energy.
        return with_slack(norm)

    @abstractmethod
    def _encode_blocks(self, values: Floats, magnitudes: Floats, codes: Bytes) -> None: ...

    @abstractmethod
    def _decode_blocks(self, magnitudes: Floats, codes: Bytes, values: Floats) -> None: ...

    def _parts(self, payload: Bytes, numel: int) -> tuple[Floats, Bytes]:
        split = _FLOAT_BYTES * self.num_magnitudes * -(-numel // BLOCK_NUMEL)
        return payload[:split].view(np.dtype("<f4")), payload[split:]


class OneBitCodec(FewBitsCodec):
    """Scaled signs: each value becomes its block's mean magnitude, with its own sign (EF-SignSGD, arXiv 1901.09847).

    Given the signs, no magnitude loses less than the mean. Zero has its sign bit like any value: in a block of zeros it
    stays zero, in others the residual takes back the next time what it has gained.
    """

    name = "1bit"
    num_magnitudes, values_per_byte = 1, 8

    def _encode_blocks(self, values: Floats, magnitudes: Floats, codes: Bytes) -> None:
        encode_one_bit(values, BLOCK_NUMEL, magnitudes, codes)

    def _decode_blocks(self, magnitudes: Floats, codes: Bytes, values: Floats) -> None:
        decode_one_bit(magnitudes, codes, BLOCK_NUMEL, values)


class TwoBitCodec(FewBitsCodec):
    """Statistical quantization: a block's values are put into two bins by magnitude, and each becomes the mean of its
    bin, with its own sign; the smaller mean comes first.

    Bins are divided where the best quantizer of a normal distribution divides them (Max, 1960): at 1.23 times the mean
    magnitude. MuLoCo (arXiv 2505.23725) finds two bits enough for DiLoCo this way, and too few at even distances.
    """

    name = "2bit"
    num_magnitudes, values_per_byte = 2, 4

    def _encode_blocks(self, values: Floats, magnitudes: Floats, codes: Bytes) -> None:
        encode_two_bits(values, BLOCK_NUMEL, magnitudes, codes)

    def _decode_blocks(self, magnitudes: Floats, codes: Bytes, values: Floats) -> None:
        decode_two_bits(magnitudes, codes, BLOCK_NUMEL, values)
