"""What is sent to the servers: all weights, or the changes since what they serve if those are fewer bytes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.rl.weight_blobs import Label, State, digest_of, packed, packed_changes, parts_of

_PART_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class Push:
    """One version's blobs."""

    version: int
    digest: str
    base: int | None
    blobs: tuple[bytes, ...]
    whole_bytes: int
    """What all weights would have been."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.blobs))


class Publisher:
    """Numbers the versions of one trainer's weights, and keeps the last in the servers' type to compare with."""

    def __init__(self, dtype: torch.dtype, *, part_bytes: int = _PART_BYTES) -> None:
        self.name = uuid.uuid4().hex
        """Tells the versions of this life of this trainer from those of others."""
        self.version = 0
        self.state: State = {}
        self._dtype, self._part_bytes = dtype, part_bytes
        self._before: State = {}

    def take(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """A new version: copies of the weights, on the CPU, in the servers' type."""
        self._before = self.state
        self.state = {
            name: _own_copy(tensor, self._dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in parameters
        }
        self.version += 1
        self._digest = digest_of(self.state)

    def push_for(self, publisher: str, version: int) -> Push:
        """What a server needs that serves this version of this publisher."""
        base = version if publisher == self.name and version == self.version - 1 and self._before else None
        whole_bytes = sum(tensor.nbytes for tensor in self.state.values())
        if base is not None:
            label = Label(version=self.version, base=base, digest=self._digest)
            patch = packed_changes(self._before, self.state, label)
            if len(patch) < whole_bytes:
                return Push(
                    version=self.version,
                    digest=self._digest,
                    base=base,
                    blobs=(patch,),
                    whole_bytes=whole_bytes,
                )
        parts = parts_of(self.state, most_bytes=self._part_bytes)
        blobs = tuple(
            packed(
                part,
                Label(version=self.version, digest=self._digest, part=number, num_parts=len(parts)),
            )
            for number, part in enumerate(parts)
        )
        return Push(
            version=self.version, digest=self._digest, base=None, blobs=blobs, whole_bytes=whole_bytes
        )


def _own_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Never the parameter itself, which training goes on to change."""
    return tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
