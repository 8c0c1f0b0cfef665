"""Averages the fragment that a worker hands over: its norm, its reduction with the other peers, and the outer step.

peers/core decides when to do which, and what the outcome means; runtime.py calls this module to carry that out. The
worker's weights are read from its *out* memory. The average is written to *in*, and the commit replaces it there by the
new anchor.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from peers.core.defaults import residual_decay_for
from peers.core.effects import Answer
from peers.core.peer import Peer
from peers.core.schedule import Schedule
from peers.core.timing import FETCH_S, SLOWEST_LINK
from peers.core.weights import Aggregation
from peers.daemon.config import codec_of, optimizer_of
from peers.errors import PeersError, RoundFailed
from peers.net.streams import RoundStreams, StreamPool
from peers.protocol.certificates import Certificate, Plan, Work
from peers.protocol.mesh import Scalar
from peers.reduce.all_reduce import OVERLAPPED_NICENESS, reduce_pseudo_gradients
from peers.reduce.arithmetic import norm_of_pseudo_gradient
from peers.reduce.bandwidth import Bandwidth
from peers.reduce.commit_log import CommitLog, Recording
from peers.reduce.copies import copy_into
from peers.reduce.plan import ReducePlan, ReduceReport
from peers.reduce.residuals import Residuals
from peers.reduce.shares import likely_neighbours, reduce_plan_of
from peers.state.handover import Ahead, EpochOutcome, Memories
from peers.state.header import StateHeader
from peers.state.outer_optimizer import rebase
from peers.state.outer_state import OuterState
from peers.state.preview import Preview
from peers.threads import give_way

log = logging.getLogger(__name__)

_PARTS = ("connect_s", "reduce_s", "preview_s", "vote_s", "apply_s")


class WorkInHand:
    """A fragment between the worker's `ready` and the answer to it. Used from one event loop."""

    def __init__(self, memories: Memories, fragment: int, *, tokens: int, step: int, last: bool) -> None:
        self.memories, self.fragment = memories, fragment
        self.tokens, self.step, self.last = tokens, step, last
        self.local = memories.out[fragment]
        """The weights that are averaged: those in *out*, or the same work rebased onto a later anchor."""
        self.inn = memories.inn[fragment]
        """The fragment's *in*: an attempt writes the average to it, a commit the new anchor."""
        self.answer: asyncio.Future[EpochOutcome] = asyncio.get_running_loop().create_future()
        self.ahead: asyncio.Future[Ahead] = asyncio.get_running_loop().create_future()
        """Set if the worker is to train on while its commit is awaited."""
        self.plan: ReducePlan | None = None
        """The plan of the attempt whose average is in *in*."""
        self.previewed: StateHeader | None = None
        """The header of the state that the outer step makes of this average."""
        self.recording: Recording | None = None
        """A recording of this attempt, made while another peer downloads the state."""
        self.contributors: list[int] = []
        """World ranks that contributed to the commit that contains this work."""
        self.parts: dict[str, Any] = dict.fromkeys(_PARTS, 0.0)
        """Seconds that the parts of the last attempt took, by their names in EpochFigures."""
        self.since = self._lap_at = time.monotonic()
        self.propose_s = 0.0
        self.grouped_at: float | None = None
        self.sent_bytes = self.received_bytes = 0
        self._has_shifted = False

    def begin_attempt(self, recording: Recording | None) -> None:
        """Forget what the previous attempt has measured and previewed."""
        self.previewed, self.recording = None, recording
        self.parts, self._lap_at = dict.fromkeys(_PARTS, 0.0), time.monotonic()
        self.grouped_at = self.grouped_at or self._lap_at

    def lap(self, part: str) -> None:
        """This part of the attempt ends now; it began where the one before ended."""
        now = time.monotonic()
        self.parts[part], self._lap_at = now - self._lap_at, now

    @property
    def others(self) -> list[int]:
        """The indices of the other fragments."""
        return [index for index in range(len(self.memories.inn)) if index != self.fragment]

    def rebase(self, base: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Move the work from one anchor onto another, in new memory: the worker still needs what is in *out*."""
        local = self.local
        is_workers = local is self.memories.out[self.fragment]
        rebased = torch.empty_like(local) if is_workers else local
        rebase(anchor[self.fragment], local, base[self.fragment], rebased)
        self.local = rebased
        self.shift_others(base, anchor)

    def shift_others(self, base: Sequence[Tensor], anchor: Sequence[Tensor]) -> None:
        """Write to the *in* of each other fragment by how much its anchor has moved."""
        for fragment in self.others:
            inn = self.memories.inn[fragment]
            if self._has_shifted:
                inn.sub_(base[fragment]).add_(anchor[fragment])
            else:
                torch.sub(anchor[fragment], base[fragment], out=inn)
        self._has_shifted = True

    def put_back(self, how: Literal["contributed", "rebase", "keep"], state: OuterState) -> None:
        """Write to *in* the weights from which the worker continues."""
        copy_into(self.inn, state.anchor[self.fragment] if how == "contributed" else self.local)

    def settle(self, answer: Answer, **figures: Any) -> None:
        """Answer the worker, which continues from what is in *in*."""
        now = time.monotonic()
        grouped_at = self.grouped_at or now
        outcome = EpochOutcome(
            epoch=answer.epoch,
            local_step=answer.local_step,
            epoch_s=answer.epoch_s,
            data_base=answer.data_base,
            fragment=self.fragment,
            head=answer.certificate.head,
            anchor_digest=answer.certificate.body.anchor,
            shifted=self.others if self._has_shifted else [],
            last=self.last,
            contributors=self.contributors,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            round_s=now - grouped_at,
            wait_s=grouped_at - self.since,
            propose_s=self.propose_s,
            **self.parts,
            **figures,
        )
        if not self.answer.done():
            self.answer.set_result(outcome)

    def fail(self, error: PeersError) -> None:
        """Answer the worker with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


class Averaging:
    """Averages one work at a time. Used from one event loop."""

    def __init__(
        self,
        core: Peer,
        manifest: Mapping[str, Scalar],
        *,
        pool: StreamPool,
        forwarded_bytes: Callable[[], int],
    ) -> None:
        self._me, self._timing, self._swarm = core.me, core.timing, core.swarm
        self._manifest, self._codec = manifest, codec_of(manifest)
        self._aggregation, schedule = Aggregation.of(manifest), Schedule.of(manifest)
        self._niceness = OVERLAPPED_NICENESS if schedule.overlap_steps else 0
        if self._niceness:
            give_way(self._niceness)
        self.pool, self._forwarded_bytes = pool, forwarded_bytes
        self._residual_decay = residual_decay_for(self._codec, schedule.local_steps)
        self.cancelled = threading.Event()
        """Setting it, from any thread, soon ends a running reduction with RoundFailed."""
        self.bandwidth = Bandwidth()
        self.residuals: list[Residuals] = []
        """By fragment, what a lossy codec has kept back."""
        self.commit_log = CommitLog()
        """Recent commits, for peers that are downloading the state."""

    async def announced(self, work: WorkInHand, state: OuterState) -> Work | None:
        """What this peer announces about its work. None where the work has failed because it is not finite."""
        residual = self.residuals[work.fragment].contribution_residual
        anchor = state.anchor[work.fragment]
        norm = await asyncio.to_thread(norm_of_pseudo_gradient, anchor, work.local, residual)
        if not math.isfinite(norm):
            # This ends the worker's life, not the daemon's: the worker's next life begins from the anchor.
            reason = "this peer's weights are not finite any more; is the learning rate too high?"
            work.fail(PeersError(reason))
            return None
        work.propose_s = time.monotonic() - work.since
        return Work(
            tokens=work.tokens,
            norm=norm,
            step=work.step,
            based_on=0,
            last=work.last,
            bandwidth=self.bandwidth.bytes_per_s,
        )

    async def reduce(self, plan: Plan, work: WorkInHand, state: OuterState, timeout_s: float) -> StateHeader:
        """Write the group's average to *in*, and return the header of the state that a commit would make of it.

        Raises RoundFailed, ProtocolError for a plan that cannot be carried out, or OSError.
        """
        until, connect_s = time.monotonic() + timeout_s, min(self._timing.connect_s, timeout_s / 2)
        stall_s, optimizer = self._timing.stall_s, optimizer_of(self._manifest, len(plan.contributors))
        work.begin_attempt(Recording() if self._may_be_fetched(plan) else None)
        reduce_plan = work.plan = reduce_plan_of(
            plan, self._me, work.local.numel(), self._codec, self._aggregation.rule, self._aggregation.trim
        )
        streams = await self._connect(plan, reduce_plan, connect_s)
        work.lap("connect_s")
        log.debug(
            "reducing with %s, exchanging with %d of %d others",
            list(reduce_plan.members),
            len(reduce_plan.neighbours),
            len(reduce_plan.members) - 1,
        )

        def reduce() -> tuple[ReduceReport, StateHeader]:
            with Preview(optimizer, state, work.fragment, average=work.inn) as preview:
                report = reduce_pseudo_gradients(
                    reduce_plan,
                    state.anchor[work.fragment],
                    work.local,
                    work.inn,
                    streams.send,
                    streams.receive,
                    stall_timeout_s=stall_s,
                    timeout_s=max(0.0, until - time.monotonic()),
                    connect_timeout_s=connect_s,
                    slowest_link=SLOWEST_LINK,
                    cancelled=self.cancelled,
                    residuals=self.residuals[work.fragment],
                    settled=preview.settled,
                    forwarded_bytes=self._forwarded_bytes,
                    niceness=self._niceness,
                    recording=work.recording,
                )
                work.lap("reduce_s")
                return report, preview.header()

        try:
            report, header = await asyncio.to_thread(reduce)
        except BaseException as error:
            # What another member says about a third one does not close this peer's streams to the third one.
            if isinstance(error, RoundFailed):
                self.pool.discard(streams, () if error.told_by else error.suspects, error.silent)
            else:
                self.pool.discard(streams)
            raise
        work.lap("preview_s")
        self.pool.give_back(streams, sent_bytes=report.sent_bytes, seconds=work.parts["reduce_s"])
        self.bandwidth.saw(report.bandwidth)
        work.sent_bytes += report.sent_bytes
        work.received_bytes += report.received_bytes
        work.previewed = header
        return header

    async def commit(self, certificate: Certificate, work: WorkInHand, state: OuterState) -> None:
        """Make the outer step that the group has voted for, and write the new anchor to *in*.

        Anchor, momentum and certificate advance together, here or with a state that is adopted whole.
        """
        assert work.plan is not None
        work.lap("vote_s")
        fragment, contributors, parent = work.fragment, certificate.plan.contributors, state.head
        state.refuse_snapshots()
        await asyncio.to_thread(
            self.residuals[fragment].commit,
            work.plan,
            state.anchor[fragment],
            work.local,
            decay=self._residual_decay,
        )
        # The new anchor replaces the average in *in*, where the worker reads it.
        await asyncio.to_thread(
            optimizer_of(self._manifest, len(contributors)).commit,
            state,
            fragment,
            average=work.inn,
            certificate=certificate,
            previewed=work.previewed,
            into=work.inn,
        )
        # A download that begins from now on begins with this commit.
        is_wanted = self.commit_log.is_wanted or self._is_missed_by_somebody(certificate.plan)
        recording = work.recording if is_wanted else None
        self.commit_log.add(recording, parent=parent, head=certificate.head, state_numel=sum(state.sizes))
        work.contributors = [contributor.world_rank for contributor in contributors]
        work.lap("apply_s")

    def forget_residuals_of(self, missed: Sequence[Certificate]) -> None:
        """These commits have been fetched: the ones with this peer's work also contain what was kept back before."""
        sent = {commit.plan.fragment for commit in missed if self._me in commit.plan.signer_set}
        self.residuals = [
            Residuals(kept.numel) if fragment in sent else kept
            for fragment, kept in enumerate(self.residuals)
        ]

    def expect(self, bandwidths: Mapping[str, float]) -> None:
        """These peers, in order of world rank, will likely be in the next round: open its streams, so that it need not
        wait for the round trips of opening.
        """
        for peer_id in likely_neighbours(self._me, bandwidths, self._aggregation.rule):
            self.pool.open_ahead(peer_id)

    def is_log_needed(self, state_numel: int) -> bool:
        """Whether peers that download the state will need all recorded commits, of which the next would drop one.

        They are not waited for if they have taken less than SLOWEST_LINK carries since the last commit, with FETCH_S to
        begin and to ask for the commits.
        """
        commit_log = self.commit_log
        if not commit_log.would_drop_needed(state_numel):
            return False
        usable_s = time.monotonic() - commit_log.added_at - FETCH_S
        return commit_log.sent_bytes >= SLOWEST_LINK * usable_s

    def _may_be_fetched(self, plan: Plan) -> bool:
        """Whether a peer downloads the state, or may begin to before this attempt is committed."""
        has_newcomers = any(not status.head for _, status in self._swarm.live())
        return self.commit_log.is_wanted or has_newcomers or self._is_missed_by_somebody(plan)

    def _is_missed_by_somebody(self, plan: Plan) -> bool:
        """Whether a peer that is at the parent of this commit, but not in the commit, will ask for it."""
        return not self._swarm.live_at(plan.parent).keys() <= plan.signer_set

    async def _connect(self, plan: Plan, reduce_plan: ReducePlan, timeout_s: float) -> RoundStreams:
        """Open streams to the neighbours, which ask for them by the same id. Raises RoundFailed."""
        neighbours = {reduce_plan.members[index] for index in reduce_plan.neighbours}
        peer_ids = {c.world_rank: c.peer_id for c in plan.contributors if c.world_rank in neighbours}
        return await self.pool.connect(
            reduce_plan.attempt,
            peer_ids,
            timeout_s=timeout_s,
            prompt_s=self._timing.prompt_s,
            cancelled=self.cancelled,
            quiet=lambda: [rank for rank, peer_id in peer_ids.items() if not self._swarm.is_live(peer_id)],
            members=reduce_plan.members,
        )


def no_residuals(state: OuterState) -> list[Residuals]:
    """Empty residuals for the fragments of this state."""
    return [Residuals(size) for size in state.sizes]
