"""The vectors that peers average, generated from seeds so that every process can compute their mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Not a multiple of a chunk or of a codec's block, so that values do not repeat at the same position in them.
_TILE_NUMEL = (1 << 20) + 7
_SCALE = 1e-2


def delta(peer: int, numel: int) -> Tensor:
    """This peer's pseudo-gradient: its random tile, repeated."""
    return _repeated(_tile(peer) * _SCALE, numel)


def anchor(numel: int) -> Tensor:
    return _repeated(_tile(-1), numel)


def relative_error(result: Tensor, num_peers: int) -> float:
    """L2 distance of `result` from the mean of all peers' deltas, as a fraction of that mean's norm."""
    tile = torch.stack([_tile(peer) * _SCALE for peer in range(num_peers)]).mean(0)
    wrong, right = 0.0, 0.0
    for part in result.split(_TILE_NUMEL):
        expected = tile[: part.numel()]
        difference = part - expected
        wrong += float(torch.dot(difference, difference))
        right += float(torch.dot(expected, expected))
    return math.sqrt(wrong / right)


def _tile(seed: int) -> Tensor:
    return torch.randn(_TILE_NUMEL, generator=torch.Generator().manual_seed(seed + 1000))


def _repeated(tile: Tensor, numel: int) -> Tensor:
    vector = torch.empty(numel)
    for part in vector.split(_TILE_NUMEL):
        part.copy_(tile[: part.numel()])
    return vector
