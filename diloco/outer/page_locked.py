"""Memory to and from which a GPU copies at the bus's speed."""

from __future__ import annotations

import contextlib
import ctypes

import torch
from torch import Tensor

_LOCKED: list[Tensor] = []
"""Memory that is freed while it is locked cannot be used by others."""


def lock_pages(memory: Tensor) -> None:
    """Page-lock this memory, which then stays until the process ends. Without a GPU, nothing is done."""
    if not memory.numel() or not torch.cuda.is_available():
        return
    if not int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        _LOCKED.append(memory)
        return
    # A refusal (a low memlock limit) only costs speed, but until the error is read, the next kernel launch raises it.
    # torch cannot read it; the CUDA runtime that it has loaded can, and has another name under ROCm.
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).cudaGetLastError()
