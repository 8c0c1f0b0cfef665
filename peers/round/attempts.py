"""What an attempt at a round moves between its members, a reduction or an audit of one: streams, threads, deadlines.

When to make one, and what its outcome means, is decided in peers/rounds.py and carried out in peers/averaging.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection

from peers.errors import RoundFailed
from peers.membership import View
from peers.network.streams import RoundStreams, StreamPool
from peers.outer_optimizer import OuterOptimizer
from peers.outer_state import OuterState
from peers.reduce import reduce_pseudo_gradients
from peers.reduction.plan import ReducePlan, ReduceReport
from peers.reduction.residuals import Residuals
from peers.round.aggregation import Aggregation
from peers.round.audit_exchange import AuditTask, audit_shares
from peers.round.leader import Timing
from peers.round.messages import Group
from peers.round.readiness import Readiness, plan_of
from peers.state.header import StateHeader
from peers.state.preview import Preview

log = logging.getLogger(__name__)

ATTEMPT_SHARE = 0.75
"""Of the time for an attempt, what its reduction may take: its failure has to be told before the leader gives up."""
CONNECT_EACH_S = 0.7
"""With more than fourteen others it takes longer than that: all call all at once, and some share a machine."""
CHANNEL_S = 3.0
"""For a broken channel to a member to come back; less than streams may take, so that nobody waits in vain for who
waits for one."""
_POLL_S = 0.05
_MANY_PEERS = 16
"""From so many on they fall silent for longer, too."""


class Attempts:
    """One at a time. `niceness`: of a reduction's threads; `quiet`: world ranks of whom nothing has been heard for a
    while; `forwarded_bytes`: what this peer has carried for others."""

    def __init__(
        self,
        *,
        me: int,
        codec: str,
        aggregation: Aggregation,
        niceness: int,
        pool: StreamPool,
        optimizer_for: Callable[[int], OuterOptimizer],
        view: Callable[[], View],
        quiet: Callable[[], Collection[int]],
        forwarded_bytes: Callable[[], int],
    ) -> None:
        self._me, self._codec, self._aggregation, self._niceness = me, codec, aggregation, niceness
        self._pool, self._optimizer_for, self._view = pool, optimizer_for, view
        self._quiet, self._forwarded_bytes = quiet, forwarded_bytes
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def begin(self) -> None:
        """The one before has ended; what comes now is not cancelled."""
        self._cancelled.clear()

    def cancel(self) -> None:
        """Whatever is under way ends soon, with RoundFailed. May be called from any thread, and repeated."""
        self._cancelled.set()

    async def reduce(
        self, group: Group, waiting: Readiness, state: OuterState, residuals: Residuals, timing: Timing
    ) -> tuple[ReduceReport, StateHeader]:
        """Connect to the members, reduce with them, and see what a commit would make of it. Raises RoundFailed.

        The average is in the worker's *in* then, and `waiting.plan` is how it came about.
        """
        began = time.monotonic()
        plan = waiting.plan = plan_of(group, self._me, waiting.local.numel(), self._codec, self._aggregation)
        optimizer, streams = (
            self._optimizer_for(len(group.ranks)),
            await self._connect(plan, plan.attempt, timing),
        )
        waiting.clock.lap("connect_s")
        log.debug("reducing with %s", group.ranks)

        def reduce() -> tuple[ReduceReport, StateHeader]:
            with Preview(optimizer, state, waiting.fragment, waiting.result) as preview:
                report = reduce_pseudo_gradients(
                    plan,
                    state.anchor[waiting.fragment],
                    waiting.local,
                    waiting.result,
                    streams.send,
                    streams.receive,
                    stall_timeout_s=_stall_s(timing, plan),
                    timeout_s=_left_s(timing, began),
                    connect_timeout_s=_connect_s(timing, plan),
                    cancelled=self._cancelled,
                    residuals=residuals,
                    settled=preview.settled,
                    forwarded_bytes=self._forwarded_bytes,
                    niceness=self._niceness,
                    recording=waiting.recording,
                )
                waiting.clock.lap("reduce_s")
                return report, preview.header()

        try:
            report, header = await asyncio.to_thread(reduce)
        except BaseException as error:
            # Nobody talks us out of a path to a third member.
            if isinstance(error, RoundFailed):
                self._pool.discard(streams, () if error.told_by else error.suspects, error.silent)
            else:
                self._pool.discard(streams)
            raise
        waiting.clock.lap("preview_s")
        self._pool.give_back(streams, sent_bytes=report.sent_bytes, seconds=waiting.clock.parts["reduce_s"])
        return report, header

    async def audit(
        self, task: AuditTask, waiting: Readiness, state: OuterState, residuals: Residuals, timing: Timing
    ) -> frozenset[int]:
        """Reduce others' shares again. World ranks of owners whose sums are false. Raises RoundFailed."""
        began = time.monotonic()
        streams = await self._connect(task.plan, task.stream_id, timing)
        try:
            disproved = await asyncio.to_thread(
                audit_shares,
                task,
                state.anchor[waiting.fragment],
                waiting.local,
                residuals.contribution,
                waiting.result,
                streams.send,
                streams.receive,
                stall_timeout_s=_stall_s(timing, task.plan),
                timeout_s=_left_s(timing, began),
                connect_timeout_s=_connect_s(timing, task.plan),
                cancelled=self._cancelled,
            )
        except BaseException as error:
            if isinstance(error, RoundFailed) and not error.told_by:
                self._pool.discard(streams, error.suspects)
            else:
                self._pool.discard(streams)
            raise
        waiting.clock.lap("audit_s")
        self._pool.give_back(streams, sent_bytes=0, seconds=0.0)
        return disproved

    async def _connect(self, plan: ReducePlan, stream_id: bytes, timing: Timing) -> RoundStreams:
        """Streams with all other members, which ask for them by the same id.

        Raises RoundFailed, soon when the attempt is cancelled.
        """
        peer_ids = await self._identities(plan.members, min(CHANNEL_S, timing.attempt_s / 4))
        timeout_s = _connect_s(timing, plan)
        return await self._pool.connect(
            stream_id, peer_ids, timeout_s=timeout_s, cancelled=self._cancelled, quiet=self._quiet
        )

    async def _identities(self, members: tuple[int, ...], timeout_s: float) -> dict[int, str]:
        """Peer ids of the others. A broken channel to one that the leader still sees is about to come back."""
        deadline, view = time.monotonic() + timeout_s, self._view()
        while gone := [rank for rank in members if rank not in view]:
            if self._cancelled.is_set() or time.monotonic() > deadline:
                raise RoundFailed(f"no channel to {gone}", gone)
            await asyncio.sleep(_POLL_S)
            view = self._view()
        return {rank: view[rank].peer_id for rank in members if rank != self._me}


def _connect_s(timing: Timing, plan: ReducePlan) -> float:
    """For streams: what they usually need, and no more than leaves time to miss a member that does not begin then."""
    patience_s = max(timing.connect_s, CONNECT_EACH_S * (len(plan.members) - 1))
    most_s = ATTEMPT_SHARE * timing.attempt_s
    return min(patience_s, max(most_s - _stall_s(timing, plan), most_s / 2))


def _left_s(timing: Timing, began: float) -> float:
    """Of an attempt's time, for what comes after its streams stand."""
    return max(0.0, ATTEMPT_SHARE * timing.attempt_s - (time.monotonic() - began))


def _stall_s(timing: Timing, plan: ReducePlan) -> float:
    return timing.stall_s * max(1.0, len(plan.members) / _MANY_PEERS)
