"""Reducing other owners' shares once more from what all members send anew, for an audit (peers/round/audit.py).

Every member sends to every other, chunk by chunk, what it contributed to each audited share, and takes the others' in
order of world rank. One thread sends, one takes. No deadlock: of all chunks that somebody waits for, take the first in
the common order of (share, chunk, member); its sender has nothing before it left to send, so it is on its way.
"""

from __future__ import annotations

import hashlib
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import blake3
import numpy as np
from torch import Tensor

from peers.codecs import PseudoGradient, codec_named, result_codec_named
from peers.errors import ProtocolError, RoundFailed
from peers.reduce import Sockets
from peers.reduction.arithmetic import Scratch, spend
from peers.reduction.frames import (
    NOBODY,
    Closed,
    Header,
    Kind,
    Stalled,
    Stopped,
    prepare,
    receive_header,
    receive_into,
    send_frame,
)
from peers.reduction.kernels import Bytes, Floats, energy
from peers.reduction.plan import ATTEMPT_BYTES, CHUNK_NUMEL, ReducePlan
from peers.reduction.progress import LAST_WORDS_S
from peers.reduction.residuals import contribution
from peers.reduction.robust_sums import combine, rows_for
from peers.round.aggregation import holds_all


@dataclass(frozen=True)
class AuditTask:
    """`inputs`: for each of these owners (indices in the group) the digest of what every member has contributed."""

    plan: ReducePlan
    owners: Sequence[int]
    inputs: Sequence[Sequence[str]]

    @property
    def stream_id(self) -> bytes:
        """What the streams of this audit are asked for by."""
        return hashlib.sha256(self.plan.attempt + b" audit").digest()[:ATTEMPT_BYTES]


def audit_shares(
    task: AuditTask,
    anchor: Tensor,
    local: Tensor,
    residual: Tensor | None,
    result: Tensor,
    send: Sockets,
    receive: Sockets,
    *,
    stall_timeout_s: float,
    timeout_s: float,
    cancelled: threading.Event,
    connect_timeout_s: float = 0.0,
) -> frozenset[int]:
    """World ranks of the owners whose sums in `result` are not those of the members' contributions.

    Tensors are flat fp32 as in the reduction that went before, unchanged since; `residual` went into what this peer
    sent. The sockets are blocking, by world rank, fresh from the pool; for `connect_timeout_s` another member may still
    wait for those with a third one. Raises RoundFailed where it cannot be told, with
    who is to blame: above all who sends something else now than it did then.
    """
    sent = contribution(anchor, local, residual)
    deadline = time.monotonic() + timeout_s
    exchange = _Exchange(task, sent, send, receive, stall_timeout_s, connect_timeout_s, deadline, cancelled)
    return exchange.run(result.numpy())


class _Lost(Exception):
    """An audit cannot go on: the index of the member at fault, if it is known, and what it does.

    `told_by`: where it is hearsay, the index of who says so.
    """

    def __init__(self, culprit: int | None, what: str, told_by: int | None = None) -> None:
        super().__init__(what)
        self.culprit, self.what, self.told_by = culprit, what, told_by


class _Exchange:
    """The two threads of one audit."""

    def __init__(
        self,
        task: AuditTask,
        sent: PseudoGradient,
        send: Sockets,
        receive: Sockets,
        stall_timeout_s: float,
        connect_timeout_s: float,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        self._task, self._plan, self._sent = task, task.plan, sent
        others = task.plan.others
        self._send = {index: send[task.plan.members[index]] for index in others}
        self._receive = {index: receive[task.plan.members[index]] for index in others}
        for sock in (*self._send.values(), *self._receive.values()):
            prepare(sock, len(others))
        self._stall_timeout_s, self._deadline, self._cancelled = stall_timeout_s, deadline, cancelled
        self._connect_s = dict.fromkeys(others, connect_timeout_s)
        self._codec = codec_named(task.plan.codec)
        self._failed = threading.Event()
        self._culprit: int | None = None
        self._words_until = math.inf

    def run(self, result: Floats) -> frozenset[int]:
        """World ranks of the owners whose sums are false. Raises RoundFailed."""
        with ThreadPoolExecutor(1, "audit") as pool:
            sending = pool.submit(self._send_all)
            try:
                looks = [self._look_at(owner, result) for owner in self._task.owners]
            except _Lost as error:
                self._give_up(error.culprit)
                raise self._failure(error) from error
            lost = sending.result()
        # Not before all is sent and taken: who breaks off leaves others to wonder why.
        for (_, found), digests in zip(looks, self._task.inputs, strict=True):
            for member, (now, then) in enumerate(zip(found, digests, strict=True)):
                if now != then:
                    raise self._failure(_Lost(member, "sends something else now than it did then"))
        if lost is not None:
            raise self._failure(lost)
        members = self._plan.members
        return frozenset(
            members[owner] for owner, (holds, _) in zip(self._task.owners, looks, strict=True) if not holds
        )

    def _give_up(self, culprit: int | None) -> None:
        self._culprit, self._words_until = culprit, time.monotonic() + LAST_WORDS_S
        self._failed.set()

    def _is_over(self) -> bool:
        return self._cancelled.is_set() or time.monotonic() > min(self._deadline, self._words_until)

    # Sending

    def _send_all(self) -> _Lost | None:
        """Returns whom it could not send everything to, if anybody."""
        scratch, lost = Scratch(self._plan), None
        reached = dict(self._send)
        for owner in self._task.owners:
            for index in range(self._plan.num_chunks(owner)):
                payload = self._encode(owner, index, scratch)
                header = Header(Kind.CONTRIBUTION, index, payload.nbytes)
                for other in list(reached):
                    if self._failed.is_set():
                        self._say_last_words(reached)
                        return lost
                    if not self._sent_to(reached[other], header, payload.data):
                        del reached[other]
                        lost = lost or _Lost(other, "takes nothing any more")
        return lost

    def _sent_to(self, sock: socket.socket, header: Header, payload: memoryview) -> bool:
        try:
            send_frame(sock, header, (payload,), 2 * self._stall_timeout_s, self._is_over)
        except (Closed, Stalled, Stopped):
            return False
        return True

    def _say_last_words(self, reached: Mapping[int, socket.socket]) -> None:
        """So that a member that stops because of another is not taken for the culprit."""
        words = Header(Kind.ABORT, NOBODY if self._culprit is None else self._culprit, 0)
        for sock in reached.values():
            self._sent_to(sock, words, memoryview(b""))

    def _encode(self, owner: int, index: int, scratch: Scratch) -> Bytes:
        chunk = self._sent.of(self._plan.chunk(owner, index))
        return self._codec.encode_contribution(chunk, scratch.values, scratch.payload)

    # Receiving

    def _look_at(self, owner: int, result: Floats) -> tuple[bool, list[str]]:
        """Whether this owner's sums are those of what all members have sent, and the digests of that."""
        plan, holds = self._plan, True
        share, scratch = _Share(plan, owner), Scratch(plan)
        buffer = np.empty_like(scratch.payload)
        for index in range(plan.num_chunks(owner)):
            for member in range(len(plan.members)):
                if member == plan.me:
                    payload = self._encode(owner, index, scratch)
                else:
                    payload = self._take(member, index, share.payload_bytes(index), buffer)
                try:
                    share.add(member, payload, scratch)
                except ProtocolError as error:
                    raise _Lost(member, str(error)) from error
            holds = share.agrees(index, result) and holds
        return holds, share.digests()

    def _take(self, member: int, index: int, size: int, buffer: Bytes) -> Bytes:
        sock, payload = self._receive[member], buffer[:size]
        try:
            patience_s = self._stall_timeout_s + self._connect_s.pop(member, 0.0)
            header = receive_header(sock, patience_s, self._is_over)
            if header.kind == Kind.ABORT:
                # Hearsay, but for who accuses us or nobody.
                known = header.chunk < len(self._plan.members) and header.chunk != self._plan.me
                if known:
                    raise _Lost(header.chunk, "is given up by another", told_by=member)
                raise _Lost(member, "gave up")
            if header != (Kind.CONTRIBUTION, index, size):
                raise ProtocolError(f"sent {header} in place of chunk {index} of {size} bytes")
            receive_into(sock, payload.data, self._stall_timeout_s, self._is_over)
        except (Closed, Stalled, ProtocolError) as error:
            raise _Lost(member, str(error) or "sends nothing") from error
        except Stopped as error:
            late = not self._cancelled.is_set()
            raise _Lost(None, "took too long" if late else "cancelled") from error
        return payload

    def _failure(self, lost: _Lost) -> RoundFailed:
        if lost.culprit is None or lost.culprit == self._plan.me:
            return RoundFailed(f"the audit {lost.what}", ())
        members = self._plan.members
        rank, told_by = members[lost.culprit], () if lost.told_by is None else (members[lost.told_by],)
        return RoundFailed(f"peer {rank}, in the audit, {lost.what}", (rank,), told_by=told_by)


class _Share:
    """One owner's share, added up again in the order and by the operations of peers/reduction/arithmetic.py."""

    def __init__(self, plan: ReducePlan, owner: int) -> None:
        self._plan, self._owner, count = plan, owner, len(plan.members)
        self._codec = codec_named(plan.codec)
        self._weights = [np.float32(weight) for weight in plan.weights_fp32()]
        self._energy_left = [plan.contribution_bound(member) for member in range(count)]
        self._hashers = [blake3.blake3() for _ in range(count)]
        self._rows = rows_for(count, CHUNK_NUMEL) if holds_all(plan.rule, count) else None
        self._total = np.empty(CHUNK_NUMEL, np.float32)
        self._index = 0

    def payload_bytes(self, index: int) -> int:
        part = self._plan.chunk(self._owner, index)
        return self._codec.encoded_bytes(part.stop - part.start)

    def add(self, member: int, payload: Bytes, scratch: Scratch) -> None:
        """The next member's contribution to the current chunk. Raises ProtocolError."""
        part = self._plan.chunk(self._owner, self._index)
        size = part.stop - part.start
        self._hashers[member].update(payload.data)
        if self._rows is not None:
            row = self._rows[member, :size]
            row[:] = self._codec.decode(payload, scratch.values[:size])
            found = energy(row)
        else:
            found = self._codec.accumulate(
                payload,
                self._weights[member],
                self._total[:size],
                scratch.values[:size],
                is_first=member == 0,
            )
        self._energy_left[member] = spend(self._energy_left[member], found, "pseudo-gradient")

    def agrees(self, index: int, result: Floats) -> bool:
        """Whether the owner's result of this chunk, which all members have added to, is near enough."""
        assert index == self._index
        part = self._plan.chunk(self._owner, index)
        average, claimed = self._total[: part.stop - part.start], result[part]
        if self._rows is not None:
            combine(self._plan.rule, self._rows[:, : average.size], np.array(self._weights), average)
        self._index += 1
        if result_codec_named(self._plan.codec).lossless:
            return bool(np.array_equal(average.view(np.uint32), claimed.view(np.uint32)))
        most = self._plan.owner_may_differ_by(math.sqrt(energy(average)), average.size)
        return energy(claimed - average) <= most * most

    def digests(self) -> list[str]:
        return [hasher.hexdigest() for hasher in self._hashers]
