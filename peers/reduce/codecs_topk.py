"""The codec that keeps the few largest values of each block, with two bits each (SparseLoCo, arXiv 2508.15706)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from peers.errors import ProtocolError
from peers.reduce.codecs_common import LARGEST_SCALE, WORKSPACE, Codec, unusable_scale, with_slack
from peers.reduce.kernels import Bytes, Floats
from peers.reduce.kernels_topk import (
    NOT_ASCENDING,
    SECTION_NUMEL,
    WRONG_COUNT,
    Indices,
    accumulate_kept,
    keep_largest,
    kept_values,
    places_of,
    put_kept,
)

BLOCK_NUMEL = 4096
CONTRIBUTION_KEPT = 64
"""Of 4096 values, the paper's blocks of 64 x 64: 1.6 %, as in its authors' own runs."""
RESULT_KEPT = 252
"""Members seldom keep the same values, so their average has more values that are not zero than a contribution has.

The paper's peers send everything to everybody, without such a limit. Three members never reach it; what more members
have beyond it waits for the next epoch. Both directions together take 73 times fewer bytes than fp32.
"""


class _Run(NamedTuple):
    """Blocks of one width that follow each other."""

    values: slice
    rows: int
    width: int
    kept: int
    """In each row."""
    entries: slice
    """The place of its kept values among all that are kept."""
    sections: slice
    levels: slice


class _Parts(NamedTuple):
    """A payload's bytes, in its order; little-endian."""

    levels: Floats
    """The two magnitudes of each block, the smaller first."""
    counts: Bytes
    """For each section of 256 values, how many of them are kept."""
    lows: Bytes
    """For each kept value, ascending, its index within its section."""
    signs: Bytes
    """A bit for each kept value: whether it is negative."""
    choices: Bytes
    """A bit for each kept value: whether its magnitude is the larger one."""


class TopKCodec(Codec):
    """The largest magnitudes of each 4096 values, `kept` of them, rounded to one of two; all other values are zero.

    Of equal magnitudes the first ones are kept. The two magnitudes come from two-means on those kept, summed in a fixed
    order; a decoder takes them from the payload. A last, shorter block keeps in proportion, rounded up. Denormals are
    values like all others. A block with NaN, an infinity or a magnitude beyond 2^64 gets levels that decoders refuse.
    """

    name = "topk"
    lossless = False
    divisible = False
    residual_reach = 1.0

    def __init__(self, kept: int) -> None:
        assert 0 < kept < SECTION_NUMEL, "the count of a section is a byte"
        self._kept = kept

    def encoded_bytes(self, numel: int) -> int:
        return sum(self._sizes(numel))

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        numel = values.size
        payload = buffer[: self.encoded_bytes(numel)]
        parts = self._parts(payload, numel)
        negative, larger = WORKSPACE.flags(2 * len(parts.lows)).reshape(2, -1)
        for run in self._runs(numel):
            keep_largest(
                values[run.values],
                run.width,
                run.kept,
                parts.levels[run.levels],
                parts.counts[run.sections],
                parts.lows[run.entries],
                negative[run.entries],
                larger[run.entries],
            )
        parts.signs[:] = np.packbits(negative)
        parts.choices[:] = np.packbits(larger)
        return payload

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        put_kept(*self._kept_of(payload, buffer.size), buffer)
        return buffer

    def accumulate(
        self, payload: Bytes, weight: np.float32, total: Floats, scratch: Floats, *, is_first: bool
    ) -> float:
        places, values = self._kept_of(payload, total.size)
        return accumulate_kept(places, values, weight, total, is_first)

    def energy_bound(self, norm: float, numel: int) -> float:
        # A mean's square is at most the mean of the squares, so no block gains energy.
        return with_slack(norm)

    def _kept_of(self, payload: Bytes, numel: int) -> tuple[Indices, Floats]:
        """Places and values of all that is kept.

        Raises ProtocolError unless each block keeps as many values as it should, and none of them twice.
        """
        parts = self._parts(payload, numel)
        if numel and not (parts.levels.min() >= 0 and parts.levels.max() <= LARGEST_SCALE):
            # If one level is NaN, so are the minimum and the maximum.
            raise unusable_scale()
        places, values = np.empty(len(parts.lows), np.int64), np.empty(len(parts.lows), np.float32)
        for run in self._runs(numel):
            mine = places[run.entries]
            found = places_of(parts.counts[run.sections], parts.lows[run.entries], run.width, run.kept, mine)
            if found == WRONG_COUNT:
                raise ProtocolError("sent a block with too few or too many values")
            if found == NOT_ASCENDING:
                raise ProtocolError("sent a block whose indices do not ascend within it")
            mine += run.values.start
            kept_values(
                parts.signs,
                parts.choices,
                parts.levels[run.levels],
                run.kept,
                run.entries.start,
                run.rows,
                values[run.entries],
            )
        return places, values

    def _runs(self, numel: int) -> list[_Run]:
        """All whole blocks, then what is left."""
        rows, rest = divmod(numel, BLOCK_NUMEL)
        whole, kept = rows * BLOCK_NUMEL, rows * self._kept
        runs = []
        if rows:
            sections = slice(0, whole // SECTION_NUMEL)
            runs.append(
                _Run(
                    slice(0, whole), rows, BLOCK_NUMEL, self._kept, slice(0, kept), sections, slice(2 * rows)
                )
            )
        if rest:
            kept_of_rest = -(-rest * self._kept // BLOCK_NUMEL)
            entries = slice(kept, kept + kept_of_rest)
            sections = slice(whole // SECTION_NUMEL, -(-numel // SECTION_NUMEL))
            levels = slice(2 * rows, 2 * rows + 2)
            runs.append(_Run(slice(whole, numel), 1, rest, kept_of_rest, entries, sections, levels))
        return runs

    def _sizes(self, numel: int) -> tuple[int, int, int, int, int]:
        """Of the parts, in bytes."""
        rows, rest = divmod(numel, BLOCK_NUMEL)
        kept = rows * self._kept - (-rest * self._kept // BLOCK_NUMEL)
        bits = (kept + 7) // 8
        return 8 * (rows + (rest > 0)), -(-numel // SECTION_NUMEL), kept, bits, bits

    def _parts(self, payload: Bytes, numel: int) -> _Parts:
        levels, counts, lows, signs, choices = np.split(payload, np.cumsum(self._sizes(numel))[:-1])
        return _Parts(levels.view("<f4"), counts, lows, signs, choices)
