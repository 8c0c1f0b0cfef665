"""The weighted all-reduce of pseudo-gradients: reduce-scatter, then all-gather, over blocking sockets in threads.

Each member owns a share of the vector. For every neighbour (grid.py; in a small group that is every other member), a
sender thread sends this peer's contribution to that member's share, and the averaged chunks of this peer's own share as
soon as they are finished; a receiver thread receives the same from the other side. In a grid, members also send the
owners in their column the sums of what they have collected, and pass on the averages of their column. Every member, the
owner too, uses the values decoded from the bytes sent.

Order. For every chunk the owner adds its members in ascending order, so the sum has the same bits whatever arrives
first: the receiver of member j waits for its turn until the member before j has added the chunk. Meanwhile it does not
read, which throttles a member that is ahead of the others. Sums are added in the same way, after the owner's own.

No deadlock. A sender never waits while it has contributions left, and a receiver waits for its turn only on the
receiver of a smaller member. So the receiver of the smallest other member always reads, its stream always makes
progress, and by induction so do all others. In a grid, collecting waits for no sum, so it always finishes; then the
same argument holds for the sums. Finished chunks stay in `result`, encoded once by the receiver of the last member,
until every sender has sent them: no buffer can run out.

Blame. The last frame of a failed stream is an abort that names the culprit and the member that accused it first. So a
member that stops because of another is not taken for the culprit, and hearsay is not taken for evidence. A member that
is accused itself blames its accuser. A member that has sent its contributions and waits for a third member names that
one in its signs of life: members that wait for it then blame the third, as hearsay. A member that does not read may be
waiting for another's frame, which must arrive within the stall timeout. Senders time out later than that, so that the
member that waits for the culprit itself is the first to notice. In a grid, a mate that does not read may be waiting
for a whole round of frames in its row, one for each share of the column: the sender waits for it that many times as
long.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import numpy as np
from torch import Tensor

from peers.errors import ProtocolError, RoundFailed
from peers.reduce.arithmetic import Arithmetic, Scratch, reduce_alone
from peers.reduce.bandwidth import SAMPLE_S, LinkMeter
from peers.reduce.commit_log import Recording
from peers.reduce.frames import (
    HEADER,
    NOBODY,
    Closed,
    Header,
    Kind,
    Stalled,
    Stopped,
    is_silent,
    prepare,
    receive_header,
    receive_into,
    send_frame,
    slice_s,
)
from peers.reduce.kernels import Bytes
from peers.reduce.plan import CHUNK_NUMEL, Chunk, ReducePlan, ReduceReport
from peers.reduce.progress import LAST_WORDS_S, Blame, Departed, Progress
from peers.reduce.residuals import Residuals
from peers.threads import keep_denormals, stand_back

Sockets = Mapping[int, socket.socket]
"""By world rank."""

OVERLAPPED_NICENESS = 5
"""Niceness of a reduction's threads while training goes on: below training, above hashing (state/preview.py)."""

CHUNK_BYTES = 4 * CHUNK_NUMEL
"""The largest payload of a chunk under any codec."""

Settled = Callable[[slice], None]
"""Called from the threads that reduce; must return at once."""


def reduce_pseudo_gradients(
    plan: ReducePlan,
    anchor: Tensor,
    local: Tensor,
    result: Tensor,
    send: Sockets,
    receive: Sockets,
    *,
    stall_timeout_s: float,
    cancelled: threading.Event,
    timeout_s: float = math.inf,
    connect_timeout_s: float = 0.0,
    slowest_link: float = math.inf,
    residuals: Residuals | None = None,
    settled: Settled = lambda part: None,
    forwarded_bytes: Callable[[], int] = lambda: 0,
    niceness: int = 0,
    recording: Recording | None = None,
) -> ReduceReport:
    """Write the weighted average of all members' `anchor - local` to `result`: the same bits on every member.

    The tensors are flat, contiguous fp32 on the CPU, of one size. The sockets are blocking, by world rank, one for each
    direction, with no unread byte.

    Timeouts: a frame must arrive within `stall_timeout_s`, plus the time that a link of `slowest_link` bytes/s needs
    for one frame from each neighbour. Before its first frame a member has `connect_timeout_s` more, to open its streams
    with others. The whole reduction has `timeout_s`. Raises RoundFailed when one of them is over, or a slice (0.05 s;
    longer with more than five neighbours) after `cancelled` is set; then all sockets are shut down and `result` is
    undefined. No thread is left in any case.

    `settled` is called with every part of `result` once its values are final, unless the reduction fails.
    `forwarded_bytes`: what this peer's link has carried for others so far, which counts towards its bandwidth.
    `niceness` of the threads is relative to the caller's. `recording` keeps the averages as they went on the wire.
    `residuals` of this fragment add what a lossy codec lost in earlier rounds; the caller commits them.
    """
    if not anchor.numel() == local.numel() == result.numel() == plan.bounds[-1]:
        raise ValueError(f"the shares cover {plan.bounds[-1]} values, the tensors have {anchor.numel()}")
    arithmetic = Arithmetic(plan, anchor, local, result, residuals, recording)
    reduction = _Reduction(
        plan,
        arithmetic,
        send,
        receive,
        stall_timeout_s,
        connect_timeout_s,
        slowest_link,
        settled,
        forwarded_bytes,
        niceness,
    )
    if not plan.neighbours:
        try:
            reduce_alone(plan, arithmetic, cancelled, settled, niceness)
        except ProtocolError as error:
            raise RoundFailed(f"this peer {error}", plan.members) from error
    reduction.run(cancelled, timeout_s)
    return reduction.report()


class _Reduction:
    """The threads of one attempt: a sender and a receiver for every neighbour."""

    def __init__(
        self,
        plan: ReducePlan,
        arithmetic: Arithmetic,
        send: Sockets,
        receive: Sockets,
        stall_timeout_s: float,
        connect_timeout_s: float,
        slowest_link: float,
        settled: Settled,
        forwarded_bytes: Callable[[], int],
        niceness: int,
    ) -> None:
        self._plan, self._arithmetic, self._settled = plan, arithmetic, settled
        self._forwarded_bytes, self._niceness = forwarded_bytes, niceness
        others = plan.neighbours
        # From here on members are identified by their index in the group.
        self._send = {index: send[plan.members[index]] for index in others}
        self._receive = {index: receive[plan.members[index]] for index in others}
        for sock in (*self._send.values(), *self._receive.values()):
            prepare(sock, len(others))
        self._stall_timeout_s, self._connect_timeout_s = stall_timeout_s, connect_timeout_s
        self._slowest_stream = slowest_link / max(1, len(others))
        self._progress = Progress(plan)
        self._source_after_me = next((source for source in plan.sources if source > plan.me), None)
        self._sampled_at = 0.0
        self._meter = LinkMeter(self._send.values(), self._receive.values())
        self._moved_out, self._moved_in = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
        self._sent = dict.fromkeys(others, 0)
        self._received = dict.fromkeys(others, 0)
        self._heard_at: dict[int, float] = {}
        self._silent: set[int] = set()
        self._offenders: set[int] = set()

    def report(self) -> ReduceReport:
        return ReduceReport(sum(self._sent.values()), sum(self._received.values()), self._meter.bytes_per_s())

    def run(self, cancelled: threading.Event, timeout_s: float) -> None:
        """Start the threads and wait until they end. Raises RoundFailed."""
        deadline, slice_ = time.monotonic() + timeout_s, slice_s(len(self._plan.neighbours))
        jobs = [
            job
            for other in self._plan.neighbours
            for job in ((self._receive_from, other), (self._send_to, other))
        ]
        with ThreadPoolExecutor(max(1, len(jobs)), "reduce") as pool:
            futures: list[Future[None]] = [pool.submit(self._carry_out, *job) for job in jobs]
            pending = set(futures)
            self._sample()
            while pending:
                done, pending = wait(pending, slice_)
                if not pending or time.monotonic() > self._sampled_at + SAMPLE_S:
                    self._sample()
                if cancelled.is_set():
                    self._progress.fail("cancelled", None, last_words_s=0)
                # A mate may itself be waiting for another member: give it time to say for which.
                patience_s = LAST_WORDS_S if self._progress.waits_for_sums() else 0.0
                if time.monotonic() > deadline + patience_s:
                    self._progress.fail(f"took longer than {timeout_s:g} s", *self._progress.slowest())
                if any(future.exception() for future in done):
                    self._progress.fail("internal error", None)
        if cancelled.is_set():
            self._progress.fail("cancelled", None)
        if (failure := self._progress.failure) is None:
            return
        for sock in (*self._send.values(), *self._receive.values()):
            _shut_down(sock, socket.SHUT_RDWR)
        for future in futures:
            future.result()
        # Members are cancelled at about the same time: the first one to close its streams is not at fault.
        culprit = None if cancelled.is_set() else failure.blame.culprit
        suspects = () if culprit is None else (self._plan.members[culprit],)
        silent = [self._plan.members[index] for index in self._silent]
        told_by = [self._plan.members[index] for index in failure.blame.told_by]
        offenders = [self._plan.members[index] for index in self._offenders]
        raise RoundFailed(failure.reason, suspects, told_by=told_by, silent=silent, offenders=offenders)

    def _carry_out(self, job: Callable[[int], None], other: int) -> None:
        keep_denormals()
        if self._niceness:
            stand_back(self._niceness)
        job(other)

    def _sample(self) -> None:
        self._sampled_at = time.monotonic()
        self._meter.sample(
            self._sampled_at,
            sum(self._moved_out.values()),
            sum(self._moved_in.values()),
            self._forwarded_bytes(),
        )

    # Sending

    def _send_to(self, other: int) -> None:
        scratch, progress, arithmetic = Scratch(self._plan), self._progress, self._arithmetic
        contributions, results = progress.contributions[other], progress.results[other]
        try:
            while (frame := progress.next_frame(other, self._stall_timeout_s / 4)) is not None:
                kind, position = frame
                if kind is Kind.ALIVE:
                    self._send_blame(other, kind, progress.slowest())
                elif kind is Kind.RESULT:
                    chunk = results[position]
                    finished = arithmetic.finished(chunk)
                    self._send_frame(other, kind, position, finished.size, (finished.data,))
                    if progress.result_sent(other, position):
                        arithmetic.settle(chunk, scratch)
                        self._settled(self._plan.place(chunk))
                elif other in self._plan.mates:
                    encoded = arithmetic.encoded_sum(contributions[position], scratch)
                    progress.sum_encoded(other, position)
                    self._send_frame(other, kind, position, len(encoded), (encoded,))
                else:
                    chunk = contributions[position]
                    pieces = arithmetic.encoded_contribution(chunk, scratch)
                    self._send_frame(other, kind, position, arithmetic.contribution_bytes(chunk), pieces)
            if progress.failure is not None:
                self._send_blame(other, Kind.ABORT, progress.failure.blame)
        except Closed:
            if progress.lost_while_sending(other):
                self._hear_last_words(other)
        except Stalled:
            progress.fail(f"{self._name(other)} took nothing in time", *progress.on_waiting_for(other))
        except Stopped:
            return

    def _send_blame(self, other: int, kind: Kind, blame: Blame) -> None:
        culprit = NOBODY if blame.culprit is None else blame.culprit
        self._send_frame(other, kind, culprit, 1 + blame.told_by[0] if blame.told_by else 0)

    def _send_frame(
        self,
        other: int,
        kind: Kind,
        chunk: int,
        payload_bytes: int = 0,
        pieces: Iterable[memoryview] = (memoryview(b""),),
    ) -> None:
        timeout_s = self._stall_timeout_s + self._frame_timeout_s(CHUNK_BYTES)
        if other in self._plan.mates:
            timeout_s *= 1 + len(self._plan.mates)
        if other not in self._heard_at:
            # A member that still opens its streams does not read yet.
            timeout_s += self._connect_timeout_s
        send_frame(
            self._send[other],
            Header(kind, chunk, payload_bytes),
            pieces,
            timeout_s,
            lambda: self._progress.must_stop_sending(other),
            partial(_count, self._moved_out, other),
        )
        if kind <= Kind.RESULT:
            self._sent[other] += HEADER.size + payload_bytes

    # Receiving

    def _receive_from(self, other: int) -> None:
        try:
            self._receive_all(other, Scratch(self._plan))
            self._progress.everything_received(other)
        except Departed:
            self._hear_last_words(other)
        except (Closed, Stalled, ProtocolError) as error:
            self._blame(other, error)
        except Stopped:
            return
        finally:
            if self._progress.has_failed():
                if self._has_gone_silent(other):
                    self._silent.add(other)
                # Tell the sender at once that nobody reads any more.
                _shut_down(self._receive[other], socket.SHUT_RD)

    def _receive_all(self, other: int, scratch: Scratch) -> None:
        """Receive all contributions and results that `other` owes: each kind in order, interleaved in any way."""
        plan, arithmetic = self._plan, self._arithmetic
        expected = plan.contributions(other, plan.me), plan.results(other, plan.me)
        num_expected, taken = [len(expected[0]), len(expected[1])], [0, 0]
        is_mate = other in plan.mates
        buffer = np.empty_like(scratch.payload)
        timeout_s = self._stall_timeout_s + self._connect_timeout_s
        while taken != num_expected:
            waits_since = time.monotonic()
            header = receive_header(self._receive[other], timeout_s, self._progress.has_failed)
            if other not in self._heard_at:
                # The first frame may be late because the member had to open its streams: the stall timeout starts now.
                waits_since, timeout_s = time.monotonic(), self._stall_timeout_s
            self._heard_at[other] = time.monotonic()
            kind = header.kind
            if kind == Kind.ABORT:
                return self._heed_abort(other, header)
            # A source can send its contributions at once, a mate may have to wait for its sums.
            owes_nothing = taken[Kind.CONTRIBUTION] == num_expected[Kind.CONTRIBUTION]
            if kind == Kind.ALIVE and (is_mate or owes_nothing):
                self._progress.says_it_waits(other, self._hearsay(other, header))
                continue
            if kind > Kind.RESULT or taken[kind] == num_expected[kind]:
                raise ProtocolError(f"sent a frame out of turn: {header}")
            position, is_result = taken[kind], kind == Kind.RESULT
            chunk = expected[kind][position]
            if is_result and is_mate and not self._progress.is_sum_encoded(other, position):
                raise ProtocolError("sent an average before it had this peer's sum")
            bytes_of = arithmetic.result_bytes if is_result or is_mate else arithmetic.contribution_bytes
            size = bytes_of(chunk)
            if header != (kind, position, size):
                raise ProtocolError(f"sent {header} in place of {Kind(kind).name} {position} of {size} bytes")
            place = arithmetic.place_for_result(chunk) if is_result else None
            payload = buffer[:size] if place is None else place
            receive_into(
                self._receive[other],
                payload.data,
                waits_since + self._frame_timeout_s(size) - time.monotonic(),
                self._progress.has_failed,
                partial(self._hear, other),
            )
            self._received[other] += HEADER.size + size
            if is_result or is_mate:
                self._progress.says_it_waits(other, None)
            if is_result and is_mate:
                arithmetic.hold_result(chunk, payload, scratch)
                self._progress.result_received(other, position)
            elif is_result:
                arithmetic.take_result(chunk, payload)
                self._settled(plan.place(chunk))
            else:
                self._add_in_turn(other, position, chunk, payload, scratch)
            taken[kind] += 1

    def _frame_timeout_s(self, num_bytes: int) -> float:
        """The timeout of one whole frame, from when its receiver starts to wait."""
        return self._stall_timeout_s + num_bytes / self._slowest_stream

    def _hear(self, other: int, num_bytes: int) -> None:
        self._moved_in[other] += num_bytes
        self._heard_at[other] = time.monotonic()

    def _has_gone_silent(self, other: int) -> bool:
        """Whether `other` began to send, then sent nothing for half the stall timeout, and nothing is left to read."""
        heard_at = self._heard_at.get(other, math.inf)
        return time.monotonic() - heard_at > self._stall_timeout_s / 2 and is_silent(self._receive[other])

    def _add_in_turn(self, other: int, position: int, chunk: Chunk, payload: Bytes, scratch: Scratch) -> None:
        plan = self._plan
        self._progress.wait_for_turn(other, position)
        if other in plan.mates:
            self._arithmetic.add_sum(other, chunk, payload, scratch)
            is_last = other == plan.mates[-1]
        else:
            if other == self._source_after_me:
                self._add_own(chunk, scratch)
            self._arithmetic.add(other, chunk, payload, scratch)
            is_last = other == plan.sources[-1]
            if is_last and self._source_after_me is None:
                self._add_own(chunk, scratch)
            is_last = is_last and not plan.mates
        if is_last:
            self._arithmetic.finish(chunk, scratch)
        self._progress.chunk_added(other, position)

    def _add_own(self, chunk: Chunk, scratch: Scratch) -> None:
        try:
            self._arithmetic.add_own(chunk, scratch)
        except ProtocolError as error:
            self._progress.fail(f"this peer {error}", self._plan.me)
            raise Stopped from error

    # Failing

    def _blame(self, other: int, error: Closed | Stalled | ProtocolError) -> None:
        if isinstance(error, Stalled):
            if other not in self._heard_at:
                self._silent.add(other)
            self._progress.fail(f"{self._name(other)} sent nothing in time", other)
        elif isinstance(error, Closed):
            self._progress.fail(f"lost {self._name(other)}: {error}", other)
        else:
            self._offenders.add(other)
            self._progress.fail(f"{self._name(other)} {error}", other)

    def _heed_abort(self, other: int, header: Header) -> None:
        """`other` has aborted. If it names this peer, this peer blames the first accuser."""
        culprit, told_by = self._hearsay(other, header)
        if culprit == self._plan.me:
            culprit, told_by = told_by[0], told_by[1:]
        # A member that aborts without naming a culprit has left the group.
        self._progress.fail(f"{self._name(other)} gave up", other if culprit is None else culprit, told_by)

    def _hearsay(self, other: int, header: Header) -> Blame:
        """Whom `other` names in an ABORT or ALIVE, by whose word: hearsay, for the leader to weigh."""
        num_members = len(self._plan.members)
        accuser = header.payload_bytes - 1
        if not 0 <= accuser < num_members or accuser in (self._plan.me, other):
            told_by: tuple[int, ...] = (other,)
        else:
            told_by = (accuser, other)
        return Blame(header.chunk if header.chunk < num_members else None, told_by)

    def _hear_last_words(self, other: int) -> None:
        """Skip what `other` still sends, up to the abort that says why it stopped reading, or until it is dead."""
        deadline = time.monotonic() + LAST_WORDS_S
        skipped = Scratch(self._plan).payload.data

        def stop() -> bool:
            return self._progress.has_failed() or time.monotonic() > deadline

        try:
            while (header := receive_header(self._receive[other], LAST_WORDS_S, stop)).kind != Kind.ABORT:
                self._heard_at[other] = time.monotonic()
                if header.payload_bytes > len(skipped):
                    raise ProtocolError(f"sent a frame that is too long: {header}")
                receive_into(self._receive[other], skipped[: header.payload_bytes], LAST_WORDS_S, stop)
            self._heed_abort(other, header)
        except Stopped:
            self._progress.fail(f"{self._name(other)} takes nothing any more", other)
        except (Closed, Stalled, ProtocolError) as error:
            self._blame(other, error)

    def _name(self, member: int) -> str:
        return f"peer {self._plan.members[member]}"


def _count(moved: dict[int, int], other: int, num_bytes: int) -> None:
    # No lock: each entry is written by one thread only.
    moved[other] += num_bytes


def _shut_down(sock: socket.socket, how: int) -> None:
    # A socket that the other end has closed already needs no shutdown.
    with contextlib.suppress(OSError):
        sock.shutdown(how)
