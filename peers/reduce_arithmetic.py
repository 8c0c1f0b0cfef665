"""The sums of the reduction, chunk by chunk, in an order and in operations that every machine rounds alike."""

from __future__ import annotations

import math
import threading

import torch
import xxhash
from torch import Tensor

from peers.codecs import codec_named
from peers.errors import ProtocolError
from peers.reduce_plan import CHUNK_NUMEL, ReducePlan


class Scratch:
    """Buffers of one thread, reused for every chunk: a fresh megabyte costs half a millisecond of page faults."""

    def __init__(self, codec_name: str) -> None:
        self.values = torch.empty(CHUNK_NUMEL)
        self.decoded = torch.empty(CHUNK_NUMEL)
        self.payload = torch.empty(codec_named(codec_name).encoded_bytes(CHUNK_NUMEL), dtype=torch.uint8)


class Arithmetic:
    """All values of one attempt. Methods work on disjoint chunks, so threads share it without a lock.

    Multiplies and adds are separate operations: `add(alpha=)` may fuse them, and then rounds otherwise on other CPUs.
    """

    def __init__(self, plan: ReducePlan, anchor: Tensor, local: Tensor, result: Tensor) -> None:
        self._plan, self._anchor, self._local, self._result = plan, anchor, local, result
        self._codec = codec_named(plan.codec)
        self._weights = plan.weights_fp32()
        self._energy_left = [plan.contribution_bound(index) for index in range(len(plan.members))]
        self._result_energy_left = [plan.result_bound()] * len(plan.members)
        self._digests = [xxhash.xxh3_128() for _ in plan.members]

    def payload_bytes(self, owner: int, index: int) -> int:
        part = self._plan.chunk(owner, index)
        return self._codec.encoded_bytes(part.stop - part.start)

    def encode_contribution(self, owner: int, index: int, scratch: Scratch) -> Tensor:
        """This peer's pseudo-gradient (anchor - local) for one chunk, as it goes on the wire."""
        part = self._plan.chunk(owner, index)
        difference = scratch.values[: part.stop - part.start]
        torch.sub(self._anchor[part], self._local[part], out=difference)
        return self._codec.encode(difference, scratch.payload)

    def add_own(self, index: int, scratch: Scratch) -> None:
        """Accumulate this peer's contribution to its own share, after the codec as everyone else's."""
        self.add(self._plan.me, index, self.encode_contribution(self._plan.me, index, scratch), scratch)

    def add(self, member: int, index: int, payload: Tensor, scratch: Scratch) -> None:
        """Accumulate one member's chunk of this peer's share; the payload may be overwritten.

        The caller keeps the order: for each chunk members ascending, for each member chunks ascending.
        """
        part = self._plan.chunk(self._plan.me, index)
        values = self._codec.decode(payload, scratch.decoded[: part.stop - part.start])
        self._energy_left[member] = self._spend(self._energy_left[member], values, "pseudo-gradient")
        if member == 0:
            torch.mul(values, self._weights[0], out=self._result[part])
        else:
            self._result[part].add_(values.mul_(self._weights[member]))

    def encode_result(self, index: int, scratch: Scratch) -> Tensor:
        """The finished chunk of this peer's share, as it goes on the wire. The same bytes at every call."""
        return self._codec.encode(self._result[self._plan.chunk(self._plan.me, index)], scratch.payload)

    def settle_result(self, index: int, payload: Tensor) -> None:
        """Once no one needs to encode this chunk any more: keep what went on the wire, as all others do."""
        self._digests[self._plan.me].update(payload.numpy().data)
        if not self._codec.lossless:
            part = self._result[self._plan.chunk(self._plan.me, index)]
            part.copy_(self._codec.decode(payload, part))

    def take_result(self, owner: int, index: int, payload: Tensor, scratch: Scratch) -> None:
        """One chunk of another owner's share."""
        part = self._plan.chunk(owner, index)
        values = self._codec.decode(payload, scratch.decoded[: part.stop - part.start])
        self._result_energy_left[owner] = self._spend(self._result_energy_left[owner], values, "average")
        self._digests[owner].update(payload.numpy().data)
        self._result[part].copy_(values)

    def share_digests(self) -> tuple[str, ...]:
        return tuple(digest.hexdigest() for digest in self._digests)

    @staticmethod
    def _spend(energy_left: float, values: Tensor, what: str) -> float:
        energy = float(torch.dot(values, values))
        if not math.isfinite(energy):
            raise ProtocolError(f"sent a {what} with values that are not finite")
        if energy > energy_left:
            raise ProtocolError(f"sent a {what} that is larger than announced")
        return energy_left - energy


def reduce_alone(plan: ReducePlan, arithmetic: Arithmetic, cancelled: threading.Event) -> None:
    """The same sums in a group of one; returns early when cancelled."""
    scratch = Scratch(plan.codec)
    for index in range(plan.num_chunks(plan.me)):
        if cancelled.is_set():
            return
        arithmetic.add_own(index, scratch)
        arithmetic.settle_result(index, arithmetic.encode_result(index, scratch))
