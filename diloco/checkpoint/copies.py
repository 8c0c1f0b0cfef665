"""A rank's tensors as they are now, in host memory, so that training can go on while they are written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopies:
    """One set of copies, as large as the tensors and used again each time; page-locked for those of a GPU."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy them. What the call before returned is overwritten, so whoever reads that must be done."""
        self._copies = {name: self._room_for(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return dict(self._copies)

    def _room_for(self, name: str, tensor: Tensor) -> Tensor:
        room = self._copies.get(name)
        if room is not None and (room.shape, room.dtype) == (tensor.shape, tensor.dtype):
            return room
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
