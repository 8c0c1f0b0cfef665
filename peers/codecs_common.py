"""What several codecs share: lent memory, the check of scales, and the slack of energy bounds."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from peers.errors import ProtocolError

LARGEST_SCALE = 2.0**64
"""Of a block. The squares of values beyond it would overflow, so no reduction takes them anyway."""


class Workspace(threading.local):
    """Buffers of one thread, reused for every chunk: a fresh megabyte costs half a millisecond of page faults.

    What they hold is undefined after the codec's call that asked for them.
    """

    def __init__(self) -> None:
        self._floats = torch.empty(0)
        self._flags = torch.empty(0, dtype=torch.bool)

    def floats(self, numel: int) -> Tensor:
        if self._floats.numel() < numel:
            self._floats = torch.empty(numel)
        return self._floats[:numel]

    def flags(self, numel: int) -> Tensor:
        if self._flags.numel() < numel:
            self._flags = torch.empty(numel, dtype=torch.bool)
        return self._flags[:numel]


WORKSPACE = Workspace()


def check_scales(smallest: float, largest: float) -> None:
    """Raises ProtocolError unless all scales between these two are usable; one that is NaN makes both of them NaN."""
    if not (smallest >= 0 and largest <= LARGEST_SCALE):
        raise ProtocolError(f"sent a block with values that are not finite, or beyond {LARGEST_SCALE:g}")


def with_slack(norm: float) -> float:
    """The energy of this norm, and what rounding may add to it."""
    # 1e-3 covers fp16's relative rounding (2^-11 of each value) and sums taken in another order on another machine.
    return norm * norm * (1 + 1e-3) + 1e-30
