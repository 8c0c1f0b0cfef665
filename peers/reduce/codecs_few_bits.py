"""Codecs that give every value one or two bits, and every block one or two magnitudes: 1bit, 2bit.

The compiled loops are like those of kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from peers.protocol.codecs import FLOAT_BYTES
from peers.reduce.codecs_common import LARGEST_SCALE, Codec, unusable_scale, with_slack
from peers.reduce.kernels import Bytes, Floats, compiled

_SPLIT = np.float32(1.23)
"""Values above this many mean magnitudes get the larger level; in a normal distribution 0.98 standard deviations."""
_LANES = 64
_SIGN_PLACE = np.uint32(31)
"""Of the sign among the bits of fp32."""
_LARGER, _NEGATIVE = np.uint8(1), np.uint8(2)


# Inlined: a call for each block costs a tenth of the time.
@numba.njit(inline="always")
def _sum_of_magnitudes(part: Floats, lanes: Floats) -> float:
    """Sum by lanes, for which memory is lent: a fixed order that the compiler can vectorise."""
    whole = part.size // _LANES * _LANES
    lanes[:] = 0
    for start in range(0, whole, _LANES):
        row = part[start : start + _LANES]
        for i in range(_LANES):
            lanes[i] += abs(row[i])
    total = 0.0
    for i in range(whole, part.size):
        total += np.float64(abs(part[i]))
    for i in range(_LANES):
        total += np.float64(lanes[i])
    return total


@compiled("void(float32[::1], int64, float32[::1], uint8[::1])")
def encode_one_bit(values: Floats, block: int, scales: Floats, signs: Bytes) -> None:
    """Encode each block with its mean magnitude. Its signs are packed by eighths: byte k holds those of value k of each
    eighth, the first eighth's in its lowest bit."""
    lanes = np.empty(_LANES, np.float32)
    bits = values.view(np.uint32)
    first_byte = 0
    for index in range(scales.size):
        part = values[index * block : (index + 1) * block]
        scales[index] = _sum_of_magnitudes(part, lanes) / part.size

        eighth = -(-part.size // 8)
        packed = signs[first_byte : first_byte + eighth]
        packed[:] = 0
        part_bits = bits[index * block : (index + 1) * block]
        for place in range(8):
            some = part_bits[place * eighth : (place + 1) * eighth]
            for i in range(some.size):
                packed[i] |= np.uint8(np.uint32(some[i] >> _SIGN_PLACE) << np.uint32(place))
        first_byte += eighth


@compiled("void(float32[::1], uint8[::1], int64, float32[::1])")
def decode_one_bit(scales: Floats, signs: Bytes, block: int, values: Floats) -> None:
    """The inverse of `encode_one_bit`. Any signs are valid."""
    bits, scale_bits = values.view(np.uint32), scales.view(np.uint32)
    first_byte = 0
    for index in range(scales.size):
        magnitude = scale_bits[index]
        part = bits[index * block : (index + 1) * block]
        eighth = -(-part.size // 8)
        packed = signs[first_byte : first_byte + eighth]
        for place in range(8):
            some = part[place * eighth : (place + 1) * eighth]
            for i in range(some.size):
                sign = np.uint32(np.uint32(packed[i]) >> np.uint32(place)) & np.uint32(1)
                some[i] = magnitude | np.uint32(sign << _SIGN_PLACE)
        first_byte += eighth


@compiled("void(float32[::1], int64, float32[::1], uint8[::1])")
def encode_two_bits(values: Floats, block: int, levels: Floats, codes: Bytes) -> None:
    """Encode each block with two levels. Its values are packed by quarters: byte k holds value k of each quarter, the
    first quarter's in its lowest bits."""
    lanes, larger_lanes = np.empty(_LANES, np.float32), np.empty(_LANES, np.float32)
    found = np.empty(block, np.uint8)
    first_code = 0
    for index in range(levels.size // 2):
        part = values[index * block : (index + 1) * block]
        whole = part.size // _LANES * _LANES
        split = np.float32(_sum_of_magnitudes(part, lanes) / part.size) * _SPLIT

        lanes[:] = 0
        larger_lanes[:] = 0
        num_larger = np.int32(0)
        for start in range(0, whole, _LANES):
            row, out = part[start : start + _LANES], found[start : start + _LANES]
            for i in range(_LANES):
                magnitude = abs(row[i])
                is_larger = magnitude > split
                larger_lanes[i] += magnitude if is_larger else np.float32(0)
                lanes[i] += np.float32(0) if is_larger else magnitude
                out[i] = (_LARGER if is_larger else np.uint8(0)) | (_NEGATIVE if row[i] < 0 else np.uint8(0))
        for i in range(whole):
            num_larger = np.int32(num_larger + np.int32(found[i] & _LARGER))
        smaller_sum = larger_sum = 0.0
        for i in range(whole, part.size):
            magnitude = abs(part[i])
            is_larger = magnitude > split
            num_larger = np.int32(num_larger + np.int32(is_larger))
            larger_sum += np.float64(magnitude) if is_larger else 0.0
            smaller_sum += 0.0 if is_larger else np.float64(magnitude)
            found[i] = (_LARGER if is_larger else np.uint8(0)) | (_NEGATIVE if part[i] < 0 else np.uint8(0))
        for i in range(_LANES):
            smaller_sum += np.float64(lanes[i])
            larger_sum += np.float64(larger_lanes[i])
        num_smaller = part.size - num_larger
        levels[2 * index] = smaller_sum / num_smaller if num_smaller else 0.0
        levels[2 * index + 1] = larger_sum / num_larger if num_larger else 0.0

        found[part.size :] = 0
        quarter = -(-part.size // 4)
        packed = codes[first_code : first_code + quarter]
        second, third, fourth = found[quarter:], found[2 * quarter :], found[3 * quarter :]
        for i in range(quarter):
            packed[i] = found[i] | (second[i] << 2) | (third[i] << 4) | (fourth[i] << 6)
        first_code += quarter


@compiled("void(float32[::1], uint8[::1], int64, float32[::1])")
def decode_two_bits(levels: Floats, codes: Bytes, block: int, values: Floats) -> None:
    """The inverse of `encode_two_bits`. Any codes are valid."""
    first_code = 0
    for index in range(levels.size // 2):
        smaller, larger = levels[2 * index], levels[2 * index + 1]
        part = values[index * block : (index + 1) * block]
        quarter = -(-part.size // 4)
        packed = codes[first_code : first_code + quarter]
        for place in range(4):
            some = part[place * quarter : (place + 1) * quarter]
            for i in range(some.size):
                code = packed[i] >> np.uint8(2 * place)
                magnitude = larger if code & _LARGER else smaller
                some[i] = -magnitude if code & _NEGATIVE else magnitude
        first_code += quarter


BLOCK_NUMEL = 512


class FewBitsCodec(Codec):
    """Each value becomes the mean magnitude of its block, or of its bin within the block, with its own sign.

        magnitudes: fp32 for each block, the smaller first | codes of all values          (little-endian)

    A block with NaN, an infinity or a mean beyond 2^64 gets magnitudes that every decoder refuses. `encode_blocks` and
    `decode_blocks` are compiled loops.
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
        self._values_per_byte, self._header_bytes = values_per_byte, FLOAT_BYTES * num_magnitudes
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
        # A block with NaN has a magnitude that is NaN, and so is the minimum then.
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

Given the signs, no magnitude loses less than the mean. A zero has a sign bit like any value: in a block of zeros it
stays zero; in others it becomes the mean magnitude, which the residual takes back the next time.
"""
TWO_BIT = FewBitsCodec(
    "2bit", num_magnitudes=2, values_per_byte=4, encode_blocks=encode_two_bits, decode_blocks=decode_two_bits
)
"""Statistical quantization: a block's values are put into two bins by magnitude, and each becomes the mean of its bin,
with its own sign.

The bins are divided where the best quantizer of a normal distribution divides them (Max, 1960): at 1.23 times the mean
magnitude. MuLoCo (arXiv 2505.23725) finds two bits enough for DiLoCo with such levels, but not with evenly spaced ones.
"""
