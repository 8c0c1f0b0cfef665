"""The interface of all codecs, and what several share: lent memory, the check of scales, the slack of energy bounds."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peers.errors import ProtocolError
from peers.reduce.kernels import Bytes, Floats, Integers, accumulate

LARGEST_SCALE = 2.0**64
"""Of a block. The squares of values beyond it would overflow, so no reduction takes them anyway."""


class PseudoGradient(NamedTuple):
    """What a member has to send, in all or of one chunk: (anchor - local) + residual."""

    anchor: Floats
    local: Floats
    residual: Floats | None

    @classmethod
    def of_tensors(cls, anchor: Tensor, local: Tensor, residual: Tensor | None) -> Self:
        # As arrays, because slicing a tensor takes many times longer.
        return cls(anchor.numpy(), local.numpy(), residual.numpy() if residual is not None else None)

    def of(self, part: slice) -> PseudoGradient:
        """The pseudo-gradient of these values only."""
        residual = self.residual[part] if self.residual is not None else None
        return PseudoGradient(self.anchor[part], self.local[part], residual)

    def values(self, out: Floats) -> Floats:
        """Write the values to the start of `out`: the same bits at every call."""
        values = np.subtract(self.anchor, self.local, out=out[: self.anchor.size])
        return values if self.residual is None else np.add(values, self.residual, out=values)


class Codec(ABC):
    """Values are flat contiguous fp32 arrays, payloads flat contiguous uint8 arrays.

    What a codec loses, the sender keeps and adds to what it sends the next time (error feedback, residuals.py).
    """

    name: str
    lossless: bool
    divisible: bool
    """Whether the payloads of consecutive parts, joined, are the payload of the whole."""
    residual_reach: float
    """The largest norm of a result's residual, as a multiple of the largest that the average itself may have: an owner
    scales a larger residual down, and members refuse a result with more. 0 if nothing is lost; a quarter if no value
    moves by more than a hundredth of its block's largest; 1 for coarser codecs. Random values need far less."""

    @abstractmethod
    def encoded_bytes(self, numel: int) -> int:
        """Exact payload size of `numel` values."""

    @abstractmethod
    def encode(self, values: Floats, buffer: Bytes) -> Bytes:
        """The payload of `values`: a view of `values` itself, or of `buffer` (at least `encoded_bytes` long)."""

    @abstractmethod
    def decode(self, payload: Bytes, buffer: Floats) -> Floats:
        """The values in `payload`: a view of `payload` itself, or of `buffer`, as long as that.

        Raises ProtocolError on a payload that no encoder wrote; a codec with fp32 or fp16 values takes any bits.
        """

    @abstractmethod
    def energy_bound(self, norm: float, numel: int) -> float:
        """The most that the squares of decoded values may sum to, if `numel` values of this L2 norm were encoded."""

    def encode_contribution(self, chunk: PseudoGradient, scratch: Floats, buffer: Bytes) -> Bytes:
        """`encode` of the chunk's values; `scratch` is lent."""
        return self.encode(chunk.values(scratch), buffer)

    def losses(self, chunk: PseudoGradient, scratch: Floats, buffer: Bytes, out: Floats) -> None:
        """Write what encoding loses of the chunk's values to `out`, which may be its residual; the rest is lent."""
        values = chunk.values(scratch)
        decoded = self.decode(self.encode(values, buffer), out)
        np.subtract(values, decoded, out=out)

    def accumulate(
        self, payload: Bytes, weight: np.float32, total: Floats, scratch: Floats, *, is_first: bool
    ) -> float:
        """Add weight x decoded values to `total`, or write them there if `is_first`; `scratch` is lent and as long.

        Returns the sum of the squares of the decoded values. Raises ProtocolError as `decode` does.
        """
        return accumulate(self.decode(payload, scratch), weight, total, is_first)


class Workspace(threading.local):
    """Buffers of one thread, reused for every chunk: a fresh megabyte costs half a millisecond of page faults.

    What they hold is undefined after the codec's call that asked for them.
    """

    def __init__(self) -> None:
        self._flags = np.empty(0, np.bool_)
        self._integers = np.empty(0, np.int8)

    def flags(self, numel: int) -> NDArray[np.bool_]:
        if self._flags.size < numel:
            self._flags = np.empty(numel, np.bool_)
        return self._flags[:numel]

    def integers(self, numel: int) -> Integers:
        if self._integers.size < numel:
            self._integers = np.empty(numel, np.int8)
        return self._integers[:numel]


WORKSPACE = Workspace()


def unusable_scale() -> ProtocolError:
    return ProtocolError(f"sent a block with values that are not finite, or beyond {LARGEST_SCALE:g}")


def with_slack(norm: float) -> float:
    """The energy of values with this norm, plus what rounding may add to it."""
    # 1e-3 covers fp16's relative rounding (2^-11 of each value) and sums taken in another order on another machine.
    return norm * norm * (1 + 1e-3) + 1e-30
