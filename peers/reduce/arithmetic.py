"""The sums of the reduction, chunk by chunk, in an order and with operations that give every machine the same bits."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np
from torch import Tensor

from peers.errors import ProtocolError
from peers.protocol.aggregation import holds_all
from peers.reduce.codecs import codec_named, result_codec_named
from peers.reduce.codecs_common import PseudoGradient
from peers.reduce.commit_log import Recording
from peers.reduce.kernels import Bytes, Floats, energy
from peers.reduce.plan import CHUNK_NUMEL, Chunk, ReducePlan, slices
from peers.reduce.residuals import Residuals
from peers.reduce.robust_sums import combine
from peers.threads import in_exact_threads

_PIECE_NUMEL = 1 << 16
"""Values encoded and sent at a time, if the codec is divisible: 256 KiB in fp32, which stay in a core's cache between
encoding and sending."""


def norm_of_pseudo_gradient(anchor: Tensor, local: Tensor, residual: Tensor | None = None) -> float:
    """The L2 norm of a peer's contribution, `(anchor - local) + residual`: the norm that it announces.

    Not finite if a value is not, or if its square overflows fp32.
    """
    sent = PseudoGradient.of_tensors(anchor, local, residual)

    def energies(mine: list[slice]) -> list[float]:
        scratch = np.empty(min(anchor.numel(), CHUNK_NUMEL), np.float32)
        return [energy(sent.of(part).values(scratch)) for part in mine]

    found = in_exact_threads("norm", energies, slices(anchor.numel()))
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
    """All values of one attempt. Threads share it: they work on disjoint chunks.

    Memory traffic limits the speed. So values that need no decoding are received at their place in `result`, and a
    finished chunk of this peer's share is encoded once, into the memory of its own values. All senders send it from
    there; when the last has sent it, it is decoded in place. The same holds for finished chunks of its mates' shares,
    which it passes on. Before they are finished, this peer's sums of contributions to them are at their places.

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
        # Rounded to fp32 once, as every member applies them.
        self._weights = [np.float32(weight) for weight in plan.weights]
        self._lock = threading.Lock()
        self._energy_left = [plan.contribution_bound(index) for index in range(len(plan.members))]
        self._sum_energy_left = {mate: plan.sum_bound(mate) for mate in plan.mates}
        self._result_energy_left = [plan.result_bound(owner) for owner in range(len(plan.members))]
        self._oversized: dict[Chunk, Bytes] = {}
        """Finished chunks that are longer encoded than their values."""
        count = len(plan.members)
        self._first = min(plan.me, *plan.sources) if plan.sources else plan.me
        rows = (count, plan.share.stop - plan.share.start)
        self._rows = np.empty(rows, np.float32) if holds_all(plan.rule, count) else None

    def contribution_bytes(self, chunk: Chunk) -> int:
        """Payload size of a member's contribution to a chunk."""
        place = self._plan.place(chunk)
        return self._codec.encoded_bytes(place.stop - place.start)

    def result_bytes(self, chunk: Chunk) -> int:
        """Payload size of the average of a chunk, and of a sum of contributions to it."""
        place = self._plan.place(chunk)
        return self._result_codec.encoded_bytes(place.stop - place.start)

    def encoded_contribution(self, chunk: Chunk, scratch: Scratch) -> Iterator[memoryview]:
        """This peer's contribution (pseudo-gradient plus residual) to one chunk, encoded, in pieces.

        Each piece is overwritten by the next. To be called once for each chunk, in their order.
        """
        place = self._plan.place(chunk)
        numel = _PIECE_NUMEL if self._codec.divisible else place.stop - place.start
        for start in range(place.start, place.stop, numel):
            yield self._encoded(slice(start, min(start + numel, place.stop)), scratch).data

    def encoded_sum(self, chunk: Chunk, scratch: Scratch) -> memoryview:
        """The sum of what this peer has collected for a chunk of a mate's share, encoded: valid until the next call."""
        part = self._plan.place(chunk)
        total = self._result[part]
        if self._kept is None:
            return self._result_codec.encode(total, scratch.payload).data
        self._kept.add_to_average(part, total, scratch.values)
        self._kept.before_coding(part, total)
        payload = self._result_codec.encode(total, scratch.payload)
        self._kept.after_coding(part, self._result_codec.decode(payload, scratch.values[: total.size]))
        return payload.data

    def add_own(self, chunk: Chunk, scratch: Scratch) -> None:
        """Accumulate this peer's contribution to a chunk that it collects, encoded and decoded like everyone else's."""
        self.add(self._plan.me, chunk, self._encoded(self._plan.place(chunk), scratch), scratch)

    def add(self, member: int, chunk: Chunk, payload: Bytes, scratch: Scratch) -> None:
        """Accumulate one member's contribution to a chunk that this peer collects.

        The caller keeps the order: for each chunk members ascending.
        """
        part = self._plan.place(chunk)
        if self._rows is not None:
            row = self._rows[member, self._within_share(part)]
            row[:] = self._codec.decode(payload, scratch.values[: row.size])
            found = energy(row)
        else:
            total = self._result[part]
            found = self._codec.accumulate(
                payload,
                self._weights[member],
                total,
                scratch.values[: total.size],
                is_first=member == self._first,
            )
        with self._lock:
            self._energy_left[member] = spend(self._energy_left[member], found, "pseudo-gradient")

    def add_sum(self, mate: int, chunk: Chunk, payload: Bytes, scratch: Scratch) -> None:
        """Accumulate what a mate has collected for a chunk of this peer's share: mates ascending, after all `add`."""
        total = self._result[self._plan.place(chunk)]
        found = self._result_codec.accumulate(
            payload, np.float32(1), total, scratch.values[: total.size], is_first=False
        )
        self._sum_energy_left[mate] = spend(self._sum_energy_left[mate], found, "sum of pseudo-gradients")

    def finish(self, chunk: Chunk, scratch: Scratch) -> None:
        """Encode the finished sum of a chunk of this peer's share."""
        part = self._plan.place(chunk)
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
        self._hold(chunk, self._result_codec.encode(total, scratch.payload))

    def finished(self, chunk: Chunk) -> Bytes:
        """The encoded average of a chunk of this peer's piece, from `finish` or `hold_result`, until it is settled."""
        if (payload := self._oversized.get(chunk)) is not None:
            return payload
        values = self._result[self._plan.place(chunk)]
        return values.view(np.uint8)[: self._result_codec.encoded_bytes(values.size)]

    def settle(self, chunk: Chunk, scratch: Scratch) -> None:
        """To be called when all senders have sent this chunk: decode it in place, to the values all others hold."""
        if self._recording is not None:
            self._recording.keep(chunk, self.finished(chunk))
        if self._result_codec.lossless:
            return
        part, encoded = self._plan.place(chunk), self.finished(chunk)
        payload = scratch.payload[: encoded.size]
        payload[:] = encoded
        decoded = self._result_codec.decode(payload, self._result[part])
        if self._kept is not None and chunk.owner == self._plan.me:
            self._kept.after_coding(part, decoded)
        self._oversized.pop(chunk, None)

    def place_for_result(self, chunk: Chunk) -> Bytes | None:
        """Where to receive the payload of a chunk of another owner's share if it needs no decoding; else None."""
        if not self._result_codec.lossless:
            return None
        return self._result[self._plan.place(chunk)].view(np.uint8)

    def take_result(self, chunk: Chunk, payload: Bytes) -> None:
        """Decode and check one chunk of another owner's share; a lossless one is at its place already."""
        self._check_result(chunk, payload, self._result[self._plan.place(chunk)])
        if self._recording is not None:
            self._recording.keep(chunk, payload)

    def hold_result(self, chunk: Chunk, payload: Bytes, scratch: Scratch) -> None:
        """Check one chunk of a mate's share, and keep it encoded, to be passed on and then settled."""
        place = self._plan.place(chunk)
        self._check_result(chunk, payload, scratch.values[: place.stop - place.start])
        self._hold(chunk, payload)

    def _check_result(self, chunk: Chunk, payload: Bytes, values: Floats) -> None:
        found = energy(self._result_codec.decode(payload, values))
        self._result_energy_left[chunk.owner] = spend(self._result_energy_left[chunk.owner], found, "average")

    def _hold(self, chunk: Chunk, payload: Bytes) -> None:
        if self._result_codec.lossless:
            return
        home = self._result[self._plan.place(chunk)].view(np.uint8)
        if payload.size > home.size:
            # A short last block, with its scales, may be longer encoded than its values were.
            self._oversized[chunk] = payload.copy()
        else:
            home[: payload.size] = payload

    def _encoded(self, part: slice, scratch: Scratch) -> Bytes:
        return self._codec.encode_contribution(self._contribution.of(part), scratch.values, scratch.payload)

    def _within_share(self, part: slice) -> slice:
        start = self._plan.share.start
        return slice(part.start - start, part.stop - start)


def reduce_alone(
    plan: ReducePlan,
    arithmetic: Arithmetic,
    cancelled: threading.Event,
    settled: Callable[[slice], None],
    niceness: int,
) -> None:
    """The reduction of a group of one; returns early when cancelled."""

    def reduce(mine: list[Chunk]) -> None:
        scratch = Scratch(plan)
        for chunk in mine:
            if cancelled.is_set():
                return
            arithmetic.add_own(chunk, scratch)
            arithmetic.finish(chunk, scratch)
            arithmetic.settle(chunk, scratch)
            settled(plan.place(chunk))

    in_exact_threads("reduce", reduce, plan.chunks([plan.me]), niceness)


def spend(energy_left: float, energy: float, what: str) -> float:
    """Subtract the energy of values received from what their sender may still send. Raises ProtocolError if they are
    not finite, or larger."""
    if not math.isfinite(energy):
        raise ProtocolError(f"sent a {what} with values that are not finite")
    if not energy <= energy_left:
        raise ProtocolError(f"sent a {what} that is larger than announced")
    return energy_left - energy
