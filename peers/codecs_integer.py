"""Codecs that give each block of values a scale, and each value a small multiple of it: int8, int4."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from peers.codecs_common import WORKSPACE, check_scales, with_slack

# Rounding to bf16 lowers a scale by 2^-8 at most: this much larger, it is never too small for the largest value.
_SCALE_HEADROOM = 1 + 2.0**-8
# Smaller ones have no finite reciprocal. Where it applies, values up to half of it become zero.
_SMALLEST_SCALE = 2.0**-126
_SCALE_BYTES = 2


class IntegerCodec:
    """Symmetric integers of a scale per block: value = integer x scale, |integer| <= `top`.

        scales: bf16 for each block | integers of all values          (little-endian)

    The scale comes from the block's largest magnitude, rounded up; values are rounded to nearest even. Magnitudes
    below 2^-127, denormals that is, become zero. A block that holds NaN, an infinity or a value beyond 2^64 has no
    scale that a decoder would take. Both directions go through the values four to six times, 64 to 256 at once.
    """

    lossless = False
    residual_decay = 1.0

    def __init__(self, name: str, *, top: int, block_numel: int, residual_reach: float) -> None:
        self.name = name
        self.residual_reach = residual_reach
        self._top, self._block_numel = top, block_numel

    def encoded_bytes(self, numel: int) -> int:
        return _SCALE_BYTES * self._num_blocks(numel) + self._integer_bytes(numel)

    def encode(self, values: Tensor, buffer: Tensor) -> Tensor:
        numel = values.numel()
        payload = buffer[: self.encoded_bytes(numel)]
        scales, packed = self._parts(payload, numel)
        multiples = WORKSPACE.floats(numel)
        for blocks, out, kept in zip(
            self._blocks(values), self._blocks(multiples), self._runs(scales, numel), strict=True
        ):
            exact = torch.maximum(blocks.amax(1), blocks.amin(1).neg_()).mul_(_SCALE_HEADROOM / self._top)
            kept.copy_(exact.clamp_(min=_SMALLEST_SCALE))
            torch.mul(blocks, torch.div(1.0, kept.float()).unsqueeze(1), out=out)
        self._pack(multiples.round_(), packed)
        return payload

    def decode(self, payload: Tensor, buffer: Tensor) -> Tensor:
        scales, packed = self._parts(payload, buffer.numel())
        if buffer.numel():
            check_scales(float(scales.amin()), float(scales.amax()))
        self._unpack(packed, buffer)
        for blocks, kept in zip(self._blocks(buffer), self._runs(scales, buffer.numel()), strict=True):
            blocks.mul_(kept.float().unsqueeze(1))
        return buffer

    def energy_bound(self, norm: float, numel: int) -> float:
        # Each value of a block moves by half its scale at most, and the scales follow the blocks' largest values:
        # ||error|| <= sqrt(block)/2 x ||scales|| <= sqrt(block)/2 x ||values|| / top, and 1 % for two roundings.
        spread = 1.01 * math.sqrt(self._block_numel) / (2 * self._top)
        return with_slack(norm * (1 + spread) + math.sqrt(numel) * _SMALLEST_SCALE)

    def _integer_bytes(self, numel: int) -> int:
        return numel

    def _pack(self, integers: Tensor, out: Tensor) -> None:
        out.copy_(integers)

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        out.copy_(packed)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self._block_numel)

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        split = _SCALE_BYTES * self._num_blocks(numel)
        return payload[:split].view(torch.bfloat16), payload[split:].view(torch.int8)

    def _blocks(self, values: Tensor) -> Iterator[Tensor]:
        """All whole blocks as rows, then what is left as a single one."""
        whole = values.numel() - values.numel() % self._block_numel
        if whole:
            yield values[:whole].view(-1, self._block_numel)
        if whole < values.numel():
            yield values[whole:].view(1, -1)

    def _runs(self, scales: Tensor, numel: int) -> Iterator[Tensor]:
        """The scales of what `_blocks` yields."""
        num_whole = numel // self._block_numel
        if num_whole:
            yield scales[:num_whole]
        if num_whole < scales.numel():
            yield scales[num_whole:]


class Int4Codec(IntegerCodec):
    """Two integers of -7..7 in a byte: value i of the first half as `low`, value i of the second as `high`.

    The byte is low + 16 x high, -119..119, so that it can be taken apart by rounding a sixteenth of it.
    """

    def _integer_bytes(self, numel: int) -> int:
        return (numel + 1) // 2

    def _pack(self, integers: Tensor, out: Tensor) -> None:
        low, high = integers[: out.numel()], integers[out.numel() :]
        low[: high.numel()].add_(high, alpha=16)
        out.copy_(low)

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        low, high = out[: packed.numel()], out[packed.numel() :]
        low.copy_(packed)
        torch.mul(low[: high.numel()], 1 / 16, out=high).round_()
        low[: high.numel()].sub_(high, alpha=16)
