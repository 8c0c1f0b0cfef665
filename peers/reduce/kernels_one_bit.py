"""Compiled loops, like those of kernels.py, of the codec with one bit per value (codecs_one_bit.py)."""

from __future__ import annotations

import numpy as np

from peers.reduce.kernels import Bytes, Floats, compiled

VALUES_PER_BYTE = 8
_LANES = 64
_SIGN_PLACE = np.uint32(31)
"""Of the sign among the bits of fp32."""


@compiled("void(float32[::1], int64, float32[::1], uint8[::1])")
def encode_one_bit(values: Floats, block: int, scales: Floats, signs: Bytes) -> None:
    """Encode each block with its mean magnitude. Its signs are packed by eighths: byte k holds those of value k of each
    eighth, the first eighth's in its lowest bit."""
    lanes = np.empty(_LANES, np.float32)
    bits = values.view(np.uint32)
    first_byte = 0
    for index in range(scales.size):
        part = values[index * block : (index + 1) * block]
        whole = part.size // _LANES * _LANES
        # Sum by lanes: a fixed order that the compiler can vectorise.
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
        scales[index] = total / part.size

        eighth = -(-part.size // VALUES_PER_BYTE)
        packed = signs[first_byte : first_byte + eighth]
        packed[:] = 0
        part_bits = bits[index * block : (index + 1) * block]
        for place in range(VALUES_PER_BYTE):
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
        eighth = -(-part.size // VALUES_PER_BYTE)
        packed = signs[first_byte : first_byte + eighth]
        for place in range(VALUES_PER_BYTE):
            some = part[place * eighth : (place + 1) * eighth]
            for i in range(some.size):
                sign = np.uint32(np.uint32(packed[i]) >> np.uint32(place)) & np.uint32(1)
                some[i] = magnitude | np.uint32(sign << _SIGN_PLACE)
        first_byte += eighth
