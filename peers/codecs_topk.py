"""The codec that keeps the few largest values of each block, with two bits each (SparseLoCo, arXiv 2508.15706)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from peers.codecs_common import LARGEST_SCALE, WORKSPACE, Codec, unusable_scale, with_slack
from peers.errors import ProtocolError
from peers.kernels import Bytes, Floats

BLOCK_NUMEL = 4096
SECTION_NUMEL = 256
"""An index is a byte within its section; how many values a section keeps is a byte, too."""
CONTRIBUTION_KEPT = 120
"""Of 4096 values: 2.9 %, the upper end of the 1 to 3 % for which the paper reports better loss than dense DiLoCo."""
RESULT_KEPT = 252
"""The members seldom keep the same values, so their average has more that count than each of them has.

What it has beyond these waits for the next epoch. Both directions together take 64 times fewer bytes than fp32.
"""
DECAY = 0.95
"""Of the error feedback, per epoch: the paper's, in place of an outer momentum."""
_STEPS_OF_TWO_MEANS = 2

Doubles = NDArray[np.float64]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


class _Run(NamedTuple):
    """Blocks of one width that follow each other."""

    values: slice
    rows: int
    width: int
    kept: int
    """In each row."""
    entries: slice
    """Where what it keeps lies among all that is kept."""
    sections: slice
    levels: slice

    def of(self, values: Floats) -> Floats:
        return values[self.values].reshape(self.rows, self.width)


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
    values like all others. A block with NaN, an infinity or a magnitude beyond 2^64 has no levels that a decoder takes.
    """

    name = "topk"
    lossless = False
    residual_decay = DECAY
    residual_reach = 1.0

    def __init__(self, kept: int) -> None:
        assert 0 < kept < SECTION_NUMEL, "the count of a section is a byte"
        self._kept = kept

    def encoded_bytes(self, numel: int) -> int:
        return sum(self._sizes(numel))

    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        numel = values.size
        payload = buffer[: self.encoded_bytes(numel)]
        parts, runs = self._parts(payload, numel), self._runs(numel)
        negative, larger = (np.empty(len(parts.lows), np.bool_) for _ in range(2))
        for run in runs:
            block = run.of(values)
            indices = _largest(block, run.kept)
            chosen = block.reshape(-1)[indices]
            levels, choice = _two_means(np.abs(chosen).reshape(run.rows, run.kept).astype(np.float64))
            parts.levels[run.levels] = levels.reshape(-1)
            parts.counts[run.sections] = np.bincount(indices // SECTION_NUMEL, minlength=_sections(run))
            parts.lows[run.entries] = indices % SECTION_NUMEL
            negative[run.entries] = np.signbit(chosen)
            larger[run.entries] = choice.reshape(-1)
        parts.signs[:] = np.packbits(negative)
        parts.choices[:] = np.packbits(larger)
        return payload

    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        numel = buffer.size
        buffer.fill(0)
        if not numel:
            return buffer
        parts = self._parts(payload, numel)
        if not (parts.levels.min() >= 0 and parts.levels.max() <= LARGEST_SCALE):
            # One that is NaN makes both of them NaN.
            raise unusable_scale()
        indices = self._indices(parts, numel)
        negative, larger = (np.unpackbits(bits, count=len(indices)) for bits in (parts.signs, parts.choices))
        chosen = parts.levels[indices // BLOCK_NUMEL * 2 + larger]
        np.negative(chosen, out=chosen, where=negative.view(np.bool_))
        buffer[indices] = chosen
        return buffer

    def energy_bound(self, norm: float, numel: int) -> float:
        # A mean's square is at most the mean of the squares, so no block gains energy.
        return with_slack(norm)

    def _indices(self, parts: _Parts, numel: int) -> Indices:
        """Of all kept values. Raises ProtocolError unless there are as many as there should be, each one once."""
        for run in self._runs(numel):
            counts = parts.counts[run.sections].reshape(run.rows, -1)
            if (counts.sum(1, dtype=np.int64) != run.kept).any():
                raise ProtocolError("sent a block with too few or too many values")
        sections = np.repeat(np.arange(len(parts.counts)), parts.counts)
        indices: Indices = np.add(sections * SECTION_NUMEL, parts.lows, dtype=np.int64)
        if (indices[1:] <= indices[:-1]).any() or indices[-1] >= numel:
            raise ProtocolError("sent a block whose indices do not ascend within it")
        return indices

    def _runs(self, numel: int) -> list[_Run]:
        """All whole blocks, then what is left."""
        rows, rest = divmod(numel, BLOCK_NUMEL)
        whole, kept = rows * BLOCK_NUMEL, rows * self._kept
        runs = []
        if rows:
            sections = slice(0, whole // SECTION_NUMEL)
            runs.append(
                _Run(slice(whole), rows, BLOCK_NUMEL, self._kept, slice(kept), sections, slice(2 * rows))
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


def _sections(run: _Run) -> int:
    return run.sections.stop - run.sections.start


def _largest(blocks: Floats, kept: int) -> Indices:
    """Flat indices of the `kept` largest magnitudes of each row, ascending; of equals the first. NaN is infinite."""
    rows, width = blocks.shape
    magnitudes = WORKSPACE.floats(blocks.size).reshape(rows, width)
    chosen = WORKSPACE.flags(blocks.size).reshape(rows, width)
    np.abs(blocks, out=magnitudes)
    magnitudes.partition(width - kept, axis=1)
    threshold = magnitudes[:, width - kept, None].copy()
    is_finite = bool(np.isfinite(magnitudes[:, width - kept :]).all())
    np.abs(blocks, out=magnitudes)
    if not is_finite:
        magnitudes[np.isnan(magnitudes)] = threshold[np.isnan(threshold)] = np.inf
    np.greater_equal(magnitudes, threshold, out=chosen)
    indices = np.flatnonzero(chosen)
    if len(indices) == rows * kept:
        return indices
    for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > kept):
        equal = np.flatnonzero(magnitudes[row] == threshold[row])
        surplus = int(np.count_nonzero(chosen[row])) - kept
        chosen[row, equal[len(equal) - surplus :]] = False
    return np.flatnonzero(chosen)


def _two_means(magnitudes: Doubles) -> tuple[Floats, Flags]:
    """For each row two magnitudes, the smaller first, and which values are to be rounded to the larger one."""
    split = _row_sums(magnitudes) / magnitudes.shape[1]
    for _ in range(_STEPS_OF_TWO_MEANS):
        larger = magnitudes > split[:, None]
        num_larger = np.count_nonzero(larger, axis=1)
        of_larger = _row_sums(np.where(larger, magnitudes, 0.0))
        of_smaller = _row_sums(np.where(larger, 0.0, magnitudes))
        high = of_larger / np.maximum(num_larger, 1)
        low = of_smaller / np.maximum(magnitudes.shape[1] - num_larger, 1)
        split = (low + high) / 2
    with np.errstate(over="ignore"):
        return np.stack((low, high), axis=1).astype(np.float32), larger


def _row_sums(values: Doubles) -> Doubles:
    """The sum of each row, by halves: its order, and so its bits, depend on no machine's vector width."""
    while (width := values.shape[1]) > 1:
        half = (width + 1) // 2
        folded = values[:, :half].copy()
        folded[:, : width - half] += values[:, half:]
        values = folded
    return values[:, 0]
