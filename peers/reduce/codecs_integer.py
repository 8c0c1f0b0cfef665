"""Codecs that give each block of values a scale, and each value a small multiple of it: int8, int4."""

from __future__ import annotations

import math

import numpy as np

from peers.reduce.codecs_common import (
    LARGEST_SCALE,
    WORKSPACE,
    Codec,
    PseudoGradient,
    unusable_scale,
    with_slack,
)
from peers.reduce.kernels import (
    Bytes,
    Floats,
    Integers,
    Words,
    accumulate_blocks,
    decode_blocks,
    encode_blocks,
    pack_nibbles,
    unpack_nibbles,
)

# Rounding to bf16 lowers a scale by 2^-8 at most: enlarged by this factor, it always covers the largest value.
_SCALE_HEADROOM = 1 + 2.0**-8
# Smaller scales have no finite reciprocal. In blocks with this scale, values up to half of it become zero.
_SMALLEST_SCALE = np.float32(2.0**-126)
_LARGEST_SCALE_BITS = int(np.float32(LARGEST_SCALE).view(np.uint32)) >> 16
_SCALE_BYTES = 2


class IntegerCodec(Codec):
    """Symmetric integers with a scale per block: value = integer x scale, |integer| <= `top`.

        scales: bf16 for each block | integers of all values          (little-endian)

    The scale comes from the block's largest magnitude, rounded up; values are rounded to nearest even. Magnitudes
    below 2^-127, which are denormal, become zero. A block that holds NaN, an infinity or a value beyond 2^64 gets a
    scale that every decoder refuses.
    """

    lossless = False
    divisible = False

    def __init__(self, name: str, *, top: int, block_numel: int, residual_reach: float) -> None:
        self.name = name
        self.residual_reach = residual_reach
        self._top, self._block_numel = top, block_numel
        self._step = np.float32(_SCALE_HEADROOM / top)

    def encoded_bytes(self, numel: int) -> int:
        return _SCALE_BYTES * self._num_blocks(numel) + self._integer_bytes(numel)

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        return self._encoded(values, None, None, buffer)

    def encode_contribution(self, chunk: PseudoGradient, scratch: Floats, buffer: Bytes) -> Bytes:
        return self._encoded(chunk.anchor, chunk.local, chunk.residual, buffer)

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        scales, packed = self._checked_parts(payload, buffer.size)
        decode_blocks(scales, self._unpacked(packed, buffer.size), self._block_numel, buffer)
        return buffer

    def accumulate(
        self, payload: Bytes, weight: np.float32, total: Floats, scratch: Floats, *, is_first: bool
    ) -> float:
        scales, packed = self._checked_parts(payload, total.size)
        integers = self._unpacked(packed, total.size)
        return accumulate_blocks(scales, integers, self._block_numel, weight, total, is_first)

    def energy_bound(self, norm: float, numel: int) -> float:
        # Each value of a block moves by half its scale at most, and the scales follow the blocks' largest values:
        # ||error|| <= sqrt(block)/2 x ||scales|| <= sqrt(block)/2 x ||values|| / top, and 1 % for two roundings.
        spread = 1.01 * math.sqrt(self._block_numel) / (2 * self._top)
        return with_slack(norm * (1 + spread) + math.sqrt(numel) * float(_SMALLEST_SCALE))

    def _integer_bytes(self, numel: int) -> int:
        return numel

    def _encoded(self, values: Floats, minus: Floats | None, plus: Floats | None, buffer: Bytes) -> Bytes:
        payload = buffer[: self.encoded_bytes(values.size)]
        scales, packed = self._parts(payload, values.size)
        integers = self._room_for_integers(packed, values.size)
        encode_blocks(values, minus, plus, self._block_numel, self._step, _SMALLEST_SCALE, scales, integers)
        self._pack(integers, packed)
        return payload

    def _room_for_integers(self, packed: Integers, numel: int) -> Integers:
        return packed

    def _pack(self, integers: Integers, packed: Integers) -> None:
        """Nothing to do where each integer has a byte of its own."""

    def _unpacked(self, packed: Integers, numel: int) -> Integers:
        return packed

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self._block_numel)

    def _parts(self, payload: Bytes, numel: int) -> tuple[Words, Integers]:
        split = _SCALE_BYTES * self._num_blocks(numel)
        return payload[:split].view(np.uint16), payload[split:].view(np.int8)

    def _checked_parts(self, payload: Bytes, numel: int) -> tuple[Words, Integers]:
        """Raises ProtocolError unless all scales are finite, not negative, and not too large."""
        scales, packed = self._parts(payload, numel)
        # As integers, non-negative floats are in their order, and negative ones and NaN are larger than all of them.
        if scales.size and int(scales.max()) > _LARGEST_SCALE_BITS:
            raise unusable_scale()
        return scales, packed


class Int4Codec(IntegerCodec):
    """Two integers of -7..7 in a byte: value i of the first half as `low`, value i of the second as `high`.

    The byte is low + 16 x high, -119..119.
    """

    def _integer_bytes(self, numel: int) -> int:
        return (numel + 1) // 2

    def _room_for_integers(self, packed: Integers, numel: int) -> Integers:
        return WORKSPACE.integers(numel)

    def _pack(self, integers: Integers, packed: Integers) -> None:
        pack_nibbles(integers, packed)

    def _unpacked(self, packed: Integers, numel: int) -> Integers:
        integers = WORKSPACE.integers(numel)
        unpack_nibbles(packed, integers)
        return integers
