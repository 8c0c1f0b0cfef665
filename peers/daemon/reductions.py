"""What an attempt moves between its members: streams, threads, and the outer step looked at in advance.

When to reduce, and what its outcome means, is decided in peers/core/round.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from peers.core.timing import SLOWEST_LINK, Timing
from peers.core.weights import Aggregation
from peers.daemon.work import WorkInHand
from peers.errors import RoundFailed
from peers.net.streams import RoundStreams, StreamPool
from peers.protocol.certificates import Plan
from peers.reduce.all_reduce import reduce_pseudo_gradients
from peers.reduce.plan import ReducePlan, ReduceReport
from peers.reduce.residuals import Residuals
from peers.reduce.shares import reduce_plan_of
from peers.state.header import StateHeader
from peers.state.outer_optimizer import OuterOptimizer
from peers.state.outer_state import OuterState
from peers.state.preview import Preview

log = logging.getLogger(__name__)


class Reductions:
    """One at a time. `niceness`: of a reduction's threads; `is_live`: whether the core hears a peer."""

    def __init__(
        self,
        *,
        me: str,
        codec: str,
        aggregation: Aggregation,
        niceness: int,
        pool: StreamPool,
        optimizer_for: Callable[[int], OuterOptimizer],
        timing: Timing,
        is_live: Callable[[str], bool],
        forwarded_bytes: Callable[[], int],
    ) -> None:
        self._me, self._codec, self._aggregation, self._niceness = me, codec, aggregation, niceness
        self._pool, self._optimizer_for = pool, optimizer_for
        self._timing, self._is_live, self._forwarded_bytes = timing, is_live, forwarded_bytes
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def begin(self) -> None:
        """The one before has ended; what comes now is not cancelled."""
        self._cancelled.clear()

    def expect(self, peer_id: str) -> None:
        """This peer is likely to be in the next one."""
        self._pool.open_ahead(peer_id)

    def cancel(self) -> None:
        """Whatever is under way ends soon, with RoundFailed. May be called from any thread, and repeated."""
        self._cancelled.set()

    async def reduce(
        self, plan: Plan, work: WorkInHand, state: OuterState, residuals: Residuals, timeout_s: float
    ) -> tuple[ReduceReport, StateHeader]:
        """Connect to the members, reduce with them, and see what a commit would make of it. Raises RoundFailed.

        The average is in the worker's *in* then, and `work.plan` is how it came about.
        """
        until = time.monotonic() + timeout_s
        reduce_plan = reduce_plan_of(
            plan, self._me, work.local.numel(), self._codec, self._aggregation.rule, self._aggregation.trim
        )
        work.plan, optimizer = reduce_plan, self._optimizer_for(len(plan.contributors))
        stall_s = self._timing.stall_s
        connect_s = min(self._timing.connect_s, timeout_s / 2)
        streams = await self._connect(plan, reduce_plan, connect_s)
        work.clock.lap("connect_s")
        log.debug("reducing with %s", list(reduce_plan.members))

        def reduce() -> tuple[ReduceReport, StateHeader]:
            with Preview(optimizer, state, work.fragment, work.result) as preview:
                report = reduce_pseudo_gradients(
                    reduce_plan,
                    state.anchor[work.fragment],
                    work.local,
                    work.result,
                    streams.send,
                    streams.receive,
                    stall_timeout_s=stall_s,
                    timeout_s=max(0.0, until - time.monotonic()),
                    connect_timeout_s=connect_s,
                    slowest_link=SLOWEST_LINK,
                    cancelled=self._cancelled,
                    residuals=residuals,
                    settled=preview.settled,
                    forwarded_bytes=self._forwarded_bytes,
                    niceness=self._niceness,
                    recording=work.recording,
                )
                work.clock.lap("reduce_s")
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
        work.clock.lap("preview_s")
        self._pool.give_back(streams, sent_bytes=report.sent_bytes, seconds=work.clock.parts["reduce_s"])
        return report, header

    async def _connect(self, plan: Plan, reduce_plan: ReducePlan, timeout_s: float) -> RoundStreams:
        """Streams with all other members, which ask for them by the same id. Raises RoundFailed."""
        peer_ids = {c.world_rank: c.peer_id for c in plan.contributors if c.peer_id != self._me}
        return await self._pool.connect(
            reduce_plan.attempt,
            peer_ids,
            timeout_s=timeout_s,
            prompt_s=self._timing.prompt_s,
            cancelled=self._cancelled,
            quiet=lambda: [rank for rank, peer_id in peer_ids.items() if not self._is_live(peer_id)],
        )
