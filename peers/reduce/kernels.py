"""Compiled loops over a chunk: one pass over the data where array operations would make four to seven.

Numba compiles them when this module is first imported on a machine (a few seconds), and caches them beside it. They
release the interpreter lock. Multiplies and adds are never fused, and sums have a fixed order, so that every machine
gets the same bits.

Numba widens the result of two 32-bit integers to 64 bits, which halves the values per vector register. So each such
result is cast back to 32 bits at once.

All arrays are C-contiguous and one-dimensional, and none overlaps another unless a docstring says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Integers = NDArray[np.int8]
Words = NDArray[np.uint16]
Reals = NDArray[np.float64]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_SUMMED_AT_ONCE = 1024
_LANES, _ROWS_AT_ONCE = 64, 4
# The bits of fp32.
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INFINITY = np.uint32(0x7F80_0000)
_BF16_NAN = np.uint16(0x7FC0)


def compiled(*signatures: str) -> Callable[[Kernel], Kernel]:
    """Compile for arguments of these types, in numba's notation."""

    def wrapped(function: Kernel, *, cache: bool) -> Any:
        return numba.njit(list(signatures), cache=cache, nogil=True, error_model="numpy")(function)

    def cached_if_possible(function: Kernel) -> Any:
        try:
            return wrapped(function, cache=True)
        except RuntimeError:
            # No writable place for the cache: every process compiles anew.
            return wrapped(function, cache=False)

    return cached_if_possible


@compiled("float64(float32[::1])")
def energy(values: Floats) -> float:
    """The sum of the squares; not finite if a value is not."""
    total = 0.0
    lanes = np.empty(_LANES, np.float32)
    for start in range(0, values.size, _SUMMED_AT_ONCE):
        part = values[start : start + _SUMMED_AT_ONCE]
        lanes[:] = 0
        whole = part.size // (_ROWS_AT_ONCE * _LANES) * (_ROWS_AT_ONCE * _LANES)
        for first in range(0, whole, _ROWS_AT_ONCE * _LANES):
            a = part[first : first + _LANES]
            b = part[first + _LANES : first + 2 * _LANES]
            c = part[first + 2 * _LANES : first + 3 * _LANES]
            d = part[first + 3 * _LANES : first + 4 * _LANES]
            for i in range(_LANES):
                lanes[i] += (a[i] * a[i] + b[i] * b[i]) + (c[i] * c[i] + d[i] * d[i])
        for rest in range(whole, part.size):
            total += part[rest] * part[rest]
        for i in range(_LANES):
            total += lanes[i]
    return total


@compiled("float64(float32[::1], float32, float32[::1], boolean)")
def accumulate(values: Floats, weight: np.float32, total: Floats, is_first: bool) -> float:
    """Add weight x values to `total`, or write it there if `is_first`. Returns the energy of the values."""
    found = 0.0
    for start in range(0, values.size, _SUMMED_AT_ONCE):
        part, place = values[start : start + _SUMMED_AT_ONCE], total[start : start + _SUMMED_AT_ONCE]
        found += energy(part)
        if is_first:
            for i in range(part.size):
                place[i] = part[i] * weight
        else:
            for i in range(part.size):
                place[i] += part[i] * weight
    return found


_ENCODE = "void(float32[::1], {}, {}, int64, float32, float32, uint16[::1], int8[::1])"


@compiled(
    _ENCODE.format("none", "none"),
    _ENCODE.format("float32[::1]", "none"),
    _ENCODE.format("float32[::1]", "float32[::1]"),
)
def encode_blocks(
    values: Floats,
    minus: Floats | None,
    plus: Floats | None,
    block: int,
    step: np.float32,
    smallest_scale: np.float32,
    scales: Words,
    integers: Integers,
) -> None:
    """Round each `block` of (values - minus) + plus to multiples of a scale of its own, ties to even.

    The scale (bf16 bits) is `step` x the largest magnitude. A block with a value that is not finite gets the scale NaN
    and zeros.
    """
    row = np.empty(block, np.float32)
    row_bits = row.view(np.uint32)
    # Two views of one number: its bits, and the float.
    bits = np.empty(1, np.uint32)
    number = bits.view(np.float32)
    for index in range(scales.size):
        start = index * block
        part = values[start : start + block]
        if minus is None:
            for i in range(part.size):
                row[i] = part[i]
        elif plus is None:
            less = minus[start : start + block]
            for i in range(part.size):
                row[i] = part[i] - less[i]
        else:
            less, more = minus[start : start + block], plus[start : start + block]
            for i in range(part.size):
                row[i] = (part[i] - less[i]) + more[i]
        largest = np.uint32(0)
        for i in range(part.size):
            magnitude = np.uint32(row_bits[i] & _MAGNITUDE)
            largest = magnitude if magnitude > largest else largest
        out = integers[start : start + block]
        if largest >= _INFINITY:
            scales[index] = _BF16_NAN
            out[:] = 0
            continue
        bits[0] = largest
        number[0] = max(number[0] * step, smallest_scale)
        # Rounded to nearest even.
        upper = (bits[0] + np.uint32(0x7FFF) + ((bits[0] >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        scales[index] = upper
        bits[0] = upper << np.uint32(16)
        reciprocal = np.float32(1) / number[0]
        for i in range(part.size):
            out[i] = np.int8(np.int32(np.rint(row[i] * reciprocal)))


@compiled("void(uint16[::1], int8[::1], int64, float32[::1])")
def decode_blocks(scales: Words, integers: Integers, block: int, values: Floats) -> None:
    """Each integer times the scale (bf16 bits) of its block."""
    bits = np.empty(1, np.uint32)
    number = bits.view(np.float32)
    for index in range(scales.size):
        bits[0] = np.uint32(scales[index]) << np.uint32(16)
        scale = number[0]
        start = index * block
        part, place = integers[start : start + block], values[start : start + block]
        for i in range(part.size):
            place[i] = np.float32(part[i]) * scale


@compiled("float64(uint16[::1], int8[::1], int64, float32, float32[::1], boolean)")
def accumulate_blocks(
    scales: Words, integers: Integers, block: int, weight: np.float32, total: Floats, is_first: bool
) -> float:
    """`accumulate` of the values that `decode_blocks` would return, without storing them."""
    bits = np.empty(1, np.uint32)
    number = bits.view(np.float32)
    found = 0.0
    for index in range(scales.size):
        bits[0] = np.uint32(scales[index]) << np.uint32(16)
        scale = number[0]
        start = index * block
        part, place = integers[start : start + block], total[start : start + block]
        if is_first:
            for i in range(part.size):
                place[i] = (np.float32(part[i]) * scale) * weight
        else:
            for i in range(part.size):
                place[i] += (np.float32(part[i]) * scale) * weight
        squares = np.int32(0)
        for i in range(part.size):
            squares = np.int32(squares + np.int32(np.int32(part[i]) * np.int32(part[i])))
        found += np.float64(squares) * np.float64(scale) * np.float64(scale)
    return found


@compiled("void(int8[::1], int8[::1])")
def pack_nibbles(integers: Integers, packed: Integers) -> None:
    """Pack two integers of -7..7 into a byte, low + 16 x high: the first half of them as lows, the second as highs."""
    lows, highs = integers[: packed.size], integers[packed.size :]
    for i in range(highs.size):
        packed[i] = lows[i] + np.int8(16) * highs[i]
    for i in range(highs.size, lows.size):
        packed[i] = lows[i]


@compiled("void(int8[::1], int8[::1])")
def unpack_nibbles(packed: Integers, integers: Integers) -> None:
    """The inverse of `pack_nibbles`. Any byte is valid and gives integers of -8..8."""
    lows, highs = integers[: packed.size], integers[packed.size :]
    for i in range(lows.size):
        lows[i] = ((packed[i] + np.int32(8)) & np.int32(15)) - np.int32(8)
    for i in range(highs.size):
        highs[i] = (packed[i] + np.int32(8)) >> np.int32(4)


@compiled("void(float32[:, :], float32[::1], int64, float32[::1])")
def trimmed_mean(rows: Floats, weights: Floats, trim: int, total: Floats) -> None:
    """For each value, the weighted mean without the `trim` (< half) lowest and highest members; rows: [members, n]."""
    members = rows.shape[0]
    values, order = np.empty(members, np.float32), np.empty(members, np.int64)
    for i in range(total.size):
        for member in range(members):
            value, place = rows[member, i], member
            while place > 0 and values[place - 1] > value:
                values[place], order[place] = values[place - 1], order[place - 1]
                place -= 1
            values[place], order[place] = value, member
        found, weighed = 0.0, 0.0
        for place in range(trim, members - trim):
            weight = np.float64(weights[order[place]])
            found += np.float64(values[place]) * weight
            weighed += weight
        if weighed > 0:
            total[i] = np.float32(found / weighed)
        else:
            total[i] = values[members // 2]


@compiled("float64(float64[::1])")
def _median(values: Reals) -> float:
    """The median; sorts `values` in place."""
    for stop in range(1, values.size):
        value, place = values[stop], stop
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value
    return (values[(values.size - 1) // 2] + values[values.size // 2]) * 0.5


@compiled("void(float32[:, :], float32[::1], int64, float32[::1])")
def centered_clip(rows: Floats, weights: Floats, iterations: int, total: Floats) -> None:
    """CenteredClip: a centre, at first the coordinate-wise median, moves by the weighted mean of the members'
    differences from it, each clipped to the median distance; rows: [members, n]."""
    members = rows.shape[0]
    distances, ordered = np.empty(members, np.float64), np.empty(members, np.float64)
    weighed = 0.0
    for member in range(members):
        weighed += np.float64(weights[member])
    for i in range(total.size):
        for member in range(members):
            ordered[member] = rows[member, i]
        total[i] = np.float32(_median(ordered))
    for _ in range(iterations):
        for member in range(members):
            found = 0.0
            for i in range(total.size):
                apart = np.float64(rows[member, i]) - np.float64(total[i])
                found += apart * apart
            distances[member] = ordered[member] = math.sqrt(found)
        radius = _median(ordered)
        for member in range(members):
            share = np.float64(weights[member]) / weighed if weighed > 0 else 1.0 / members
            far = distances[member] > radius
            # From here on `distances` holds the factor of each member's difference.
            distances[member] = share * (radius / distances[member] if far else 1.0)
        for i in range(total.size):
            moved = 0.0
            for member in range(members):
                moved += (np.float64(rows[member, i]) - np.float64(total[i])) * distances[member]
            total[i] += np.float32(moved)
