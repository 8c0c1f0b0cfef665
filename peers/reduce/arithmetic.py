"""The sums of the reduction, chunk by chunk, in an order and with operations that give every machine the same bits."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
from torch import Tensor

from peers.errors import ProtocolError
from peers.protocol.aggregation import holds_all
from peers.reduce.codecs import codec_named, result_codec_named
from peers.reduce.codecs_common import PseudoGradient
from peers.reduce.commit_log import Recording
from peers.reduce.kernels import Bytes, energy
from peers.reduce.plan import CHUNK_NUMEL, ReducePlan, slices
from peers.reduce.residuals import Residuals
from peers.reduce.robust_sums import combine
from peers.threads import keep_denormals, num_threads

_PIECE_NUMEL = 1 << 16
"""Values encoded and sent at a time, if the codec is divisible: 256 KiB in fp32, which stay in a core's cache between
the two."""


def norm_of_pseudo_gradient(anchor: Tensor, local: Tensor, residual: Tensor | None = None) -> float:
    """The L2 norm of a peer's contribution, `(anchor - local) + residual`: the norm that it announces.

    Not finite if a value is not, or if its square overflows fp32.
    """
    parts, at_once = list(slices(anchor.numel())), num_threads()
    sent = PseudoGradient.of_tensors(anchor, local, residual)

    def energies(mine: list[slice]) -> list[float]:
        scratch = np.empty(min(anchor.numel(), CHUNK_NUMEL), np.float32)
        return [energy(sent.of(part).values(scratch)) for part in mine]

    with ThreadPoolExecutor(at_once, "norm", keep_denormals) as pool:
        found = pool.map(energies, [parts[first::at_once] for first in range(at_once)])
    # fsum is exact: the result does not depend on the number of threads.
    total = math.fsum(chain.from_iterable(found))
    return math.sqrt(total) if total >= 0 else math.nan


class Scratch:
    """The buffers of one thread, reused for every chunk: a fresh megabyte costs half a millisecond of page faults."""

    def __init__(self, plan: ReducePlan) -> None:
        self.values = np.empty(CHUNK_NUMEL, np.float32)
        longest = max(
            codec.encoded_bytes(CHUNK_NUMEL)
            for codec in (codec_named(plan.codec), result_codec_named(plan.codec))
        )
        self.payload = np.empty(longest, np.uint8)


class Arithmetic:
    """All values of one attempt. Methods work on disjoint chunks, so threads share it without a lock.

    Memory traffic limits the speed. So values that need no decoding are received at their place in `result`, and a
    finished chunk of this peer's share is encoded once, into the memory of its own values. All senders send it from
    there; when the last has sent it, it is decoded in place.

    `residuals` add what a lossy codec lost before, and keep what it loses now.
    """

    def __init__(
        self,
        plan: ReducePlan,
        anchor: Tensor,
        local: Tensor,
        result: Tensor,
        residuals: Residuals | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._recording = recording
        self._plan, self._result = plan, result.numpy()
        self._codec, self._result_codec = codec_named(plan.codec), result_codec_named(plan.codec)
        self._kept = residuals.for_attempt(plan) if residuals is not None else None
        residual = self._kept.contribution_residual if self._kept is not None else None
        self._contribution = PseudoGradient.of_tensors(anchor, local, residual)
        self._weights = [np.float32(weight) for weight in plan.weights_fp32()]
        self._energy_left = [plan.contribution_bound(index) for index in range(len(plan.members))]
        self._result_energy_left = [plan.result_bound()] * len(plan.members)
        self._oversized: dict[int, Bytes] = {}
        """Finished chunks that are longer encoded than their values, by index."""
        share = plan.bounds[plan.me + 1] - plan.bounds[plan.me]
        count = len(plan.members)
        self._rows = np.empty((count, share), np.float32) if holds_all(plan.rule, count) else None

    def contribution_bytes(self, owner: int, index: int) -> int:
        """Payload size of a member's contribution to a chunk of this owner's share."""
        return self._codec.encoded_bytes(self._plan.chunk_size(owner, index))

    def result_bytes(self, owner: int, index: int) -> int:
        """Payload size of the average of a chunk of this owner's share."""
        return self._result_codec.encoded_bytes(self._plan.chunk_size(owner, index))

    def encoded_contribution(self, owner: int, index: int, scratch: Scratch) -> Iterator[memoryview]:
        """This peer's contribution (pseudo-gradient plus residual) to one chunk, encoded, in pieces.

        Each piece is overwritten by the next. To be called once for each chunk, in their order.
        """
        chunk = self._plan.chunk(owner, index)
        numel = _PIECE_NUMEL if self._codec.divisible else chunk.stop - chunk.start
        for start in range(chunk.start, chunk.stop, numel):
            yield self._encoded(owner, slice(start, min(start + numel, chunk.stop)), scratch).data

    def add_own(self, index: int, scratch: Scratch) -> None:
        """Accumulate this peer's contribution to its own share, encoded and decoded like everyone else's."""
        me = self._plan.me
        self.add(me, index, self._encoded(me, self._plan.chunk(me, index), scratch), scratch)

    def add(self, member: int, index: int, payload: Bytes, scratch: Scratch) -> None:
        """Accumulate one member's chunk of this peer's share.

        The caller keeps the order: for each chunk members ascending, for each member chunks ascending.
        """
        part = self._plan.chunk(self._plan.me, index)
        if self._rows is not None:
            row = self._rows[member, self._within_share(part)]
            row[:] = self._codec.decode(payload, scratch.values[: row.size])
            found = energy(row)
        else:
            total = self._result[part]
            found = self._codec.accumulate(
                payload, self._weights[member], total, scratch.values[: total.size], is_first=member == 0
            )
        self._energy_left[member] = spend(self._energy_left[member], found, "pseudo-gradient")

    def finish(self, index: int, scratch: Scratch) -> None:
        """Encode the finished sum of a chunk of this peer's share. To be called in the order of the chunks."""
        part = self._plan.chunk(self._plan.me, index)
        total = self._result[part]
        if self._rows is not None:
            combine(
                self._plan.rule,
                self._plan.trim,
                self._rows[:, self._within_share(part)],
                np.array(self._weights),
                total,
            )
        if self._kept is not None:
            self._kept.add_to_average(part, total, scratch.values)
            self._kept.before_coding(part, total)
        payload = self._result_codec.encode(total, scratch.payload)
        if not self._result_codec.lossless:
            home = total.view(np.uint8)
            if payload.size > home.size:
                # A short last block, with its scales, may be longer encoded than its values were.
                self._oversized[index] = payload.copy()
            else:
                home[: payload.size] = payload

    def finished(self, index: int) -> Bytes:
        """The encoded average of a chunk that `finish` has made; valid until it is settled."""
        if (payload := self._oversized.get(index)) is not None:
            return payload
        values = self._result[self._plan.chunk(self._plan.me, index)]
        return values.view(np.uint8)[: self._result_codec.encoded_bytes(values.size)]

    def settle(self, index: int, scratch: Scratch) -> None:
        """To be called when all senders have sent this chunk: decode it in place, to the values all others hold."""
        if self._recording is not None:
            self._recording.keep(self._plan.me, index, self.finished(index))
        if self._result_codec.lossless:
            return
        part, encoded = self._plan.chunk(self._plan.me, index), self.finished(index)
        payload = scratch.payload[: encoded.size]
        payload[:] = encoded
        decoded = self._result_codec.decode(payload, self._result[part])
        if self._kept is not None:
            self._kept.after_coding(part, decoded)
        self._oversized.pop(index, None)

    def place_for_result(self, owner: int, index: int) -> Bytes | None:
        """Where to receive the payload of a chunk of another owner's share if it needs no decoding; else None."""
        if not self._result_codec.lossless:
            return None
        return self._result[self._plan.chunk(owner, index)].view(np.uint8)

    def take_result(self, owner: int, index: int, payload: Bytes) -> None:
        """Decode and check one chunk of another owner's share; a lossless one is at its place already."""
        values = self._result_codec.decode(payload, self._result[self._plan.chunk(owner, index)])
        found = energy(values)
        self._result_energy_left[owner] = spend(self._result_energy_left[owner], found, "average")
        if self._recording is not None:
            self._recording.keep(owner, index, payload)

    def _encoded(self, owner: int, part: slice, scratch: Scratch) -> Bytes:
        return self._codec.encode_contribution(self._contribution.of(part), scratch.values, scratch.payload)

    def _within_share(self, part: slice) -> slice:
        start = self._plan.bounds[self._plan.me]
        return slice(part.start - start, part.stop - start)


def reduce_alone(plan: ReducePlan, arithmetic: Arithmetic, cancelled: threading.Event) -> None:
    """The reduction of a group of one; returns early when cancelled."""
    scratch = Scratch(plan)
    for index in range(plan.num_chunks(plan.me)):
        if cancelled.is_set():
            return
        arithmetic.add_own(index, scratch)
        arithmetic.finish(index, scratch)
        arithmetic.settle(index, scratch)


def spend(energy_left: float, energy: float, what: str) -> float:
    """Subtract the energy of values received from what their sender may still send. Raises ProtocolError if they are
    not finite, or larger."""
    if not math.isfinite(energy):
        raise ProtocolError(f"sent a {what} with values that are not finite")
    if not energy <= energy_left:
        raise ProtocolError(f"sent a {what} that is larger than announced")
    return energy_left - energy
