"""Memory to and from which a GPU copies at the bus's speed."""

from __future__ import annotations

import torch
from torch import Tensor


def lock_pages(memory: Tensor) -> None:
    """Page-lock this memory, which must then stay until the process ends. Without a GPU, nothing is done."""
    if memory.numel() and torch.cuda.is_available():
        # A refusal (a low memlock limit) only costs speed.
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
