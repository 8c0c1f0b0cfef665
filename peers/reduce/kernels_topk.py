"""Compiled loops, like those of kernels.py, of the codec that keeps the largest values of each block (codecs_topk.py).

Magnitudes are compared by their bits as integers, which have the same order; NaN counts as infinite.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from peers.reduce.kernels import Bytes, Floats, compiled

Doubles = NDArray[np.float64]
Numbers = NDArray[np.uint32]
Indices = NDArray[np.int64]

SECTION_NUMEL = 256
"""Indices are bytes within a section; the number of values that a section keeps is a byte, too."""
STEPS_OF_TWO_MEANS = 2
RIGHT, WRONG_COUNT, NOT_ASCENDING = 0, 1, 2
"""The results of `places_of`."""

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INFINITY = np.uint32(0x7F80_0000)
_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS
_GUESS_BELOW = np.uint32(1 << 21)
"""Subtracted from a magnitude's bits: a quarter of an octave."""


@compiled("uint32(uint32[::1], int64, int64, int64[::1])")
def largest_at(numbers: Numbers, size: int, rank: int, counts: Indices) -> np.uint32:
    """The `rank`-th largest (1: the largest) of the first `size` numbers, which are below 2^31. Reorders them.

    `counts` is scratch memory.
    """
    shift = 31
    prefix = np.uint32(0)
    while shift > 0:
        width = min(_DIGIT_BITS, shift)
        shift -= width
        counts[:] = 0
        for i in range(size):
            counts[(numbers[i] >> np.uint32(shift)) & np.uint32((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while counts[digit] < rank:
            rank -= counts[digit]
            digit -= 1
        prefix |= np.uint32(digit) << np.uint32(shift)
        left = 0
        for i in range(size):
            number = numbers[i]
            if (number >> np.uint32(shift)) == (prefix >> np.uint32(shift)):
                numbers[left] = number
                left += 1
        size = left
    return prefix


@compiled("float64(float64[::1], int64)")
def folded_sum(values: Doubles, size: int) -> float:
    """The sum of the first `size` values by halves: the same order and bits on every machine. Overwrites them."""
    while size > 1:
        half = (size + 1) // 2
        for i in range(size - half):
            values[i] += values[half + i]
        size = half
    return values[0]


@compiled("void(float64[::1], float64[::1], float32[::1], boolean[::1])")
def two_means(magnitudes: Doubles, scratch: Doubles, levels: Floats, is_larger: NDArray[np.bool_]) -> None:
    """Two-means clustering: two levels, the smaller first, and which magnitudes are rounded to the larger one."""
    size = magnitudes.size
    scratch[:size] = magnitudes
    split = folded_sum(scratch, size) / size
    low = high = 0.0
    for _ in range(STEPS_OF_TWO_MEANS):
        num_larger = 0
        for i in range(size):
            is_larger[i] = magnitudes[i] > split
            num_larger += is_larger[i]
            scratch[i] = magnitudes[i] if is_larger[i] else 0.0
        high = folded_sum(scratch, size) / max(num_larger, 1)
        for i in range(size):
            scratch[i] = 0.0 if is_larger[i] else magnitudes[i]
        low = folded_sum(scratch, size) / max(size - num_larger, 1)
        split = (low + high) / 2
    levels[0], levels[1] = low, high


@compiled(
    "void(float32[::1], int64, int64, float32[::1], uint8[::1], uint8[::1], boolean[::1], boolean[::1])"
)
def keep_largest(
    values: Floats,
    block: int,
    kept: int,
    levels: Floats,
    counts: Bytes,
    lows: Bytes,
    is_negative: NDArray[np.bool_],
    is_larger: NDArray[np.bool_],
) -> None:
    """Of each whole `block` of values, keep the `kept` values of largest magnitude; of equal ones the first.

    `levels` [2 a block], `counts` [one a section]; `lows`, `is_negative` and `is_larger` [kept a block].
    """
    bits = np.empty(block, np.uint32)
    places, numbers = np.empty(block, np.int64), np.empty(block, np.uint32)
    digits = np.empty(_DIGITS, np.int64)
    magnitudes, scratch = np.empty(kept, np.float64), np.empty(kept, np.float64)
    sections = -(-block // SECTION_NUMEL)
    guess = np.uint32(0)
    for index in range(values.size // block):
        row = values[index * block : (index + 1) * block]
        row_bits = row.view(np.uint32)
        for i in range(block):
            magnitude = np.uint32(row_bits[i] & _MAGNITUDE)
            bits[i] = magnitude if magnitude < _INFINITY else _INFINITY
        # Blocks of a vector are similar: values well below the last block's threshold are skipped.
        found = 0
        for i in range(block):
            places[found] = i
            found += bits[i] >= guess
        if found < kept:
            for i in range(block):
                places[i] = i
            found = block
        for i in range(found):
            numbers[i] = bits[places[i]]
        threshold = largest_at(numbers, found, kept, digits)
        guess = threshold - min(threshold, _GUESS_BELOW)
        num_equal = kept
        for i in range(found):
            num_equal -= bits[places[i]] > threshold
        entry = 0
        for i in range(found):
            place = places[i]
            number = bits[place]
            if number < threshold or (number == threshold and num_equal == 0):
                continue
            num_equal -= number == threshold
            places[entry] = place
            entry += 1
        for section in range(sections):
            counts[index * sections + section] = 0
        first = index * kept
        for entry in range(kept):
            i = places[entry]
            counts[index * sections + i // SECTION_NUMEL] += 1
            lows[first + entry] = i % SECTION_NUMEL
            is_negative[first + entry] = row_bits[i] > _MAGNITUDE
            magnitudes[entry] = np.float64(abs(row[i]))
        two_means(magnitudes, scratch, levels[2 * index : 2 * index + 2], is_larger[first : first + kept])


@compiled("int64(uint8[::1], uint8[::1], int64, int64, int64[::1])")
def places_of(counts: Bytes, lows: Bytes, block: int, kept: int, places: Indices) -> int:
    """Write the places of the values that `keep_largest` kept to `places`. Returns RIGHT, or what is wrong with the
    payload."""
    sections = -(-block // SECTION_NUMEL)
    entry = 0
    for index in range(counts.size // sections):
        num_counted = np.int64(0)
        for section in range(sections):
            num_counted += np.int64(counts[index * sections + section])
        if num_counted != kept:
            return WRONG_COUNT
        for section in range(sections):
            start, last = section * SECTION_NUMEL, np.int64(-1)
            for _ in range(np.int64(counts[index * sections + section])):
                low = np.int64(lows[entry])
                if low <= last or start + low >= block:
                    return NOT_ASCENDING
                last = low
                places[entry] = index * block + start + low
                entry += 1
    return RIGHT


@compiled("void(uint8[::1], uint8[::1], float32[::1], int64, int64, int64, float32[::1])")
def kept_values(
    signs: Bytes, choices: Bytes, levels: Floats, kept: int, first: int, num_blocks: int, values: Floats
) -> None:
    """The kept values of `num_blocks` blocks with `kept` values each, whose bits in the payload begin at `first`."""
    for index in range(num_blocks):
        for i in range(index * kept, (index + 1) * kept):
            byte, bit = (first + i) >> 3, np.uint8(128) >> ((first + i) & 7)
            value = levels[2 * index + 1] if choices[byte] & bit else levels[2 * index]
            values[i] = -value if signs[byte] & bit else value


@compiled("void(int64[::1], float32[::1], float32[::1])")
def put_kept(places: Indices, kept: Floats, values: Floats) -> None:
    """Write the kept values to their places, and zeros elsewhere."""
    values[:] = 0
    for i in range(places.size):
        values[places[i]] = kept[i]


@compiled("float64(int64[::1], float32[::1], float32, float32[::1], boolean)")
def accumulate_kept(
    places: Indices, kept: Floats, weight: np.float32, total: Floats, is_first: bool
) -> float:
    """Add weight x the kept values to `total`; if `is_first`, to zeros. Returns the energy of the kept values."""
    if is_first:
        total[:] = 0
    found = 0.0
    for i in range(places.size):
        total[places[i]] += kept[i] * weight
        found += np.float64(kept[i]) * np.float64(kept[i])
    return found
