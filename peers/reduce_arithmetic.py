"""The sums of the reduction, chunk by chunk, in an order and in operations that every machine rounds alike."""

from __future__ import annotations

import math
import threading

import numpy as np
import torch
import xxhash
from torch import Tensor

from peers.codecs import codec_named, result_codec_named
from peers.errors import ProtocolError
from peers.reduce_plan import CHUNK_NUMEL, ReducePlan
from peers.residuals import Residuals, contribution


class Scratch:
    """Buffers of one thread, reused for every chunk: a fresh megabyte costs half a millisecond of page faults."""

    def __init__(self, codec_name: str) -> None:
        self.values = torch.empty(CHUNK_NUMEL)
        self.decoded = torch.empty(CHUNK_NUMEL)
        longest = max(
            codec.encoded_bytes(CHUNK_NUMEL)
            for codec in (codec_named(codec_name), result_codec_named(codec_name))
        )
        self.payload = torch.empty(longest, dtype=torch.uint8)


class Arithmetic:
    """All values of one attempt. Methods work on disjoint chunks, so threads share it without a lock.

    Multiplies and adds are separate operations: `add(alpha=)` may fuse them, and then rounds otherwise on other CPUs.
    They are NumPy's, whose loops are shorter to enter and wider than torch's, and give the same bits.

    What is read and written beside the cache decides the speed. So values that come as they are go straight to their
    place in `result`; and a finished chunk of this peer's share is encoded once, into the memory of its own values,
    from where all senders send it, and decoded in place when the last of them has.

    What a lossy codec lost before goes in by `residuals`, if there are any, and what it loses now is kept there.
    """

    def __init__(
        self,
        plan: ReducePlan,
        anchor: Tensor,
        local: Tensor,
        result: Tensor,
        residuals: Residuals | None = None,
    ) -> None:
        self._plan, self._anchor, self._local, self._result = plan, anchor, local, result
        self._result_array = result.numpy()
        self._codec, self._result_codec = codec_named(plan.codec), result_codec_named(plan.codec)
        self._kept = residuals.for_attempt(plan) if residuals is not None else None
        self._weights = [np.float32(weight) for weight in plan.weights_fp32()]
        self._energy_left = [plan.contribution_bound(index) for index in range(len(plan.members))]
        self._result_energy_left = [plan.result_bound()] * len(plan.members)
        self._digests = [xxhash.xxh3_128() for _ in plan.members]
        self._unhoused: dict[int, Tensor] = {}

    def payload_bytes(self, owner: int, index: int) -> int:
        """Of a contribution to this peer's share, or of a result from another owner's."""
        part = self._plan.chunk(owner, index)
        codec = self._codec if owner == self._plan.me else self._result_codec
        return codec.encoded_bytes(part.stop - part.start)

    def encode_contribution(self, owner: int, index: int, scratch: Scratch) -> Tensor:
        """This peer's pseudo-gradient (anchor - local) and residual for one chunk, as it goes on the wire."""
        residual = self._kept.contribution if self._kept is not None else None
        part = self._plan.chunk(owner, index)
        values = contribution(self._anchor, self._local, residual, part, scratch.values)
        return self._codec.encode(values, scratch.payload)

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
        array, total = values.numpy(), self._result_array[part]
        if member == 0:
            np.multiply(array, self._weights[0], out=total)
        else:
            np.multiply(array, self._weights[member], out=array)
            np.add(total, array, out=total)

    def finish(self, index: int, scratch: Scratch) -> None:
        """Encode the finished sum of a chunk of this peer's share. To be called in the order of the chunks."""
        part = self._plan.chunk(self._plan.me, index)
        if self._kept is not None:
            self._kept.add_to_average(part, self._result[part], scratch.decoded)
            self._kept.before_coding(part, self._result[part])
        payload = self._result_codec.encode(self._result[part], scratch.payload)
        self._digests[self._plan.me].update(payload.numpy().data)
        if not self._result_codec.lossless:
            home = self._result[part].view(torch.uint8)
            if len(payload) > len(home):
                # A few values in a block of their own may take more room encoded than they had.
                self._unhoused[index] = payload.clone()
            else:
                home[: len(payload)].copy_(payload)

    def finished(self, index: int) -> Tensor:
        """What `finish` has made of this chunk, until it is settled."""
        if (payload := self._unhoused.get(index)) is not None:
            return payload
        part = self._plan.chunk(self._plan.me, index)
        return self._result[part].view(torch.uint8)[
            : self._result_codec.encoded_bytes(part.stop - part.start)
        ]

    def settle(self, index: int, scratch: Scratch) -> None:
        """Once nobody needs to send this chunk any more: keep the values that went on the wire, as all others do."""
        if self._result_codec.lossless:
            return
        part, encoded = self._plan.chunk(self._plan.me, index), self.finished(index)
        payload = scratch.payload[: len(encoded)].copy_(encoded)
        decoded = self._decode_to(part, payload)
        if self._kept is not None:
            self._kept.after_coding(part, decoded)
        self._unhoused.pop(index, None)

    def place_for_result(self, owner: int, index: int) -> Tensor | None:
        """Where the payload of this chunk of another owner's share may be received, if it needs no decoding."""
        if not self._result_codec.lossless:
            return None
        return self._result[self._plan.chunk(owner, index)].view(torch.uint8)

    def take_result(self, owner: int, index: int, payload: Tensor) -> None:
        """One chunk of another owner's share."""
        values = self._decode_to(self._plan.chunk(owner, index), payload)
        self._result_energy_left[owner] = self._spend(self._result_energy_left[owner], values, "average")
        self._digests[owner].update(payload.numpy().data)

    def share_digests(self) -> tuple[str, ...]:
        return tuple(digest.hexdigest() for digest in self._digests)

    def _decode_to(self, part: slice, payload: Tensor) -> Tensor:
        """The values in `payload`, at their place in the result."""
        place = self._result[part]
        values = self._result_codec.decode(payload, place)
        if values.data_ptr() != place.data_ptr():
            place.copy_(values)
        return place

    @staticmethod
    def _spend(energy_left: float, values: Tensor, what: str) -> float:
        # Not torch.dot: its library would start threads of its own from each of ours.
        energy = float(torch.linalg.vector_norm(values)) ** 2
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
        arithmetic.finish(index, scratch)
        arithmetic.settle(index, scratch)
