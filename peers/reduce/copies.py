"""Copies of whole vectors, in several threads: one core uses a small part of a large machine's memory bandwidth."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from peers.reduce.plan import slices
from peers.threads import in_exact_threads


def copy_into(out: Tensor, values: Tensor) -> None:
    """Copy all values to `out`. Both are flat and on the CPU, of one size and type."""
    source, target = values.numpy(), out.numpy()

    def copy(mine: list[slice]) -> None:
        for part in mine:
            np.copyto(target[part], source[part])

    in_exact_threads("copy", copy, slices(values.numel()))


def cloned(values: Tensor) -> Tensor:
    """A copy in new memory, whose page faults the threads share."""
    copy = torch.empty_like(values)
    copy_into(copy, values)
    return copy
