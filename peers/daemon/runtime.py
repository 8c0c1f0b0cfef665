"""Carries out the core's effects, and reports back what came of them. It decides nothing.

Reductions and downloads run in the background; everything else is done in the turn of its event (core_loop.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torch import Tensor

from peers.core import effects, events
from peers.core.effects import Effect
from peers.core.peer import Peer
from peers.daemon.averaging import Averaging, WorkInHand, no_residuals
from peers.daemon.beginning import Beginning
from peers.daemon.core_loop import CoreLoop
from peers.daemon.downloads import Downloads
from peers.daemon.pledges import Pledges
from peers.errors import PeersError, RoundFailed, StateUnavailable
from peers.net.mesh import Mesh
from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Offer, Status
from peers.reduce.residuals import Residuals
from peers.state.handover import Ahead, EpochOutcome, Start
from peers.state.outer_state import OuterState
from peers.timing import COMMIT_S

log = logging.getLogger(__name__)

_NEWCOMER_S = COMMIT_S
"""For this long after it has started, a peer may be about to download the state: commits are recorded for it."""


class Runtime(CoreLoop):
    """Owns one peer's outer state, and the core that decides about it."""

    def __init__(
        self,
        core: Peer,
        *,
        mesh: Mesh,
        averaging: Averaging,
        pledges: Pledges,
        downloads: Downloads,
        on_change: Callable[[], None],
        on_tell: Callable[[effects.Tell], None],
    ) -> None:
        super().__init__(core)
        self._mesh = mesh
        self.averaging, self._pledges, self._downloads = averaging, pledges, downloads
        self._on_change, self._on_tell = on_change, on_tell
        self.state: OuterState | None = None
        """This peer's outer state, once it has one of the run. Only this class sets it."""
        self.status: Status | None = None
        """What the core last said of itself."""
        self._offered: OuterState | None = None
        """The state from which the run could begin, by this peer's first worker."""
        self._fetched: OuterState | None = None
        self._base: list[Tensor] | None = None
        """The anchor on which the worker's weights are based, where the state has moved on without it."""
        self._work: WorkInHand | None = None
        self._beginning: Beginning | None = None
        self._reducing: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._expected: tuple[str, frozenset[str]] = "", frozenset()
        """A head, and the peers on it to which streams were opened ahead of its round."""

    # What the worker asks for

    async def begin_worker(
        self, inn: Sequence[Tensor], offered: OuterState, residuals: Sequence[Residuals] | None = None
    ) -> Start:
        """Where a new worker begins, once the run has a state; the anchor is in its *in* memories (`inn`) then.

        The run begins from `offered` if it has no state yet, and the founders agree on this one.
        """
        beginning = Beginning(inn)

        async def arrive() -> events.Event:
            # Set in its turn: the worker before it may still be waiting for an answer.
            self._beginning = beginning
            if self.state is None and self._offered is None:
                self._offered = offered
                self.averaging.residuals = list(residuals) if residuals else no_residuals(offered)
                self.post(events.StateOffered(_offer_of(offered)))
            return events.WorkerWaits()

        self.post(arrive)
        return await beginning.start

    async def average(self, work: WorkInHand) -> EpochOutcome:
        """Have the work averaged. Its *in* then holds what the worker continues from; its *out* is only read.

        Raises PeersError where the work cannot be averaged.
        """

        async def hand_over() -> events.Event | None:
            assert self.state is not None
            self._work = work
            if self._base is not None:
                await self._rebase()
            announced = await self.averaging.announced(work, self.state)
            if announced is None:
                self._work = None
                return None
            return events.WorkReady(announced)

        self.post(hand_over)
        try:
            return await work.answer
        finally:
            work.answer.cancel()

    # What the core has decided

    def _perform(self, effect: Effect) -> Coroutine[Any, Any, None] | None:
        match effect:
            case effects.Send(peer_id, message):
                if isinstance(message, Status):
                    self._mesh.send_status(peer_id)
                else:
                    self._mesh.send_to(peer_id, message)
            case effects.Broadcast(message):
                if isinstance(message, Status):
                    self.status = message
                    self._mesh.broadcast_status()
                else:
                    self._mesh.broadcast(message)
            case effects.CancelReduce():
                self.averaging.cancelled.set()
            case effects.GoAhead(epoch, data_base, epoch_s):
                if self._work is not None and not self._work.ahead.done():
                    ahead = Ahead(epoch=epoch, data_base=data_base, epoch_s=epoch_s)
                    self._work.ahead.set_result(ahead)
            case effects.Tell():
                log.info("%s", effect.text)
                self._on_tell(effect)
            case effects.Pledge(head, attempt):
                return asyncio.to_thread(self._pledges.add, head, attempt)
            case effects.Reduce(plan, timeout_s):
                return self._begin_reducing(plan, timeout_s)
            case effects.Apply(certificate):
                return self._apply(certificate)
            case effects.Fetch(path, donors, timeout_s):
                self._stop_fetching()
                self._fetching = self._in_background(self._fetch(path, donors, timeout_s))
            case effects.Adopt(certificate):
                return self._adopt(certificate)
            case effects.Rebase():
                return self._rebase()
            case effects.Answer():
                return self._answer(effect)
        return None

    def _event_handled(self) -> None:
        self._expect_others()
        self._on_change()

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            await self._stop_reducing()
            self._stop_fetching()

    def _expect_others(self) -> None:
        """Open streams to peers that are new on this head, or back: opening takes round trips, for which a round would
        wait."""
        core = self.core
        if core.phase != "training":
            return
        known = self._expected[1] if self._expected[0] == core.head else frozenset[str]()
        here = core.swarm.live_at(core.head).keys()
        if here != known:
            self._expected = core.head, frozenset(here)
            for peer_id in here - known:
                self.averaging.pool.open_ahead(peer_id)

    # Reductions and commits

    async def _begin_reducing(self, plan: Plan, timeout_s: float) -> None:
        await self._stop_reducing()
        self.averaging.cancelled.clear()
        self._reducing = self._in_background(self._reduce(plan, timeout_s))

    async def _reduce(self, plan: Plan, timeout_s: float) -> None:
        work, state = self._work, self.state
        assert work is not None and state is not None
        try:
            header = await self.averaging.reduce(
                plan, work, state, timeout_s, is_peer_joining=self._is_peer_joining()
            )
        except (PeersError, OSError) as error:
            if not self.averaging.cancelled.is_set():
                log.info("attempt %d at epoch %d failed: %s", plan.attempt, plan.epoch, error)
                self.post(_reduce_failed(plan, error))
        else:
            self.post(events.Reduced(plan.digest, header.anchor_digest, header.momentum_digest))

    def _is_peer_joining(self) -> bool:
        now_ns, lately_ns = time.time_ns(), int(_NEWCOMER_S * 1e9)
        # The absolute difference: a peer whose clock is ahead would otherwise count as joining for ever.
        return any(
            status.phase in ("waiting", "fetching") and abs(now_ns - status.incarnation) < lately_ns
            for _, status in self.core.swarm.live()
        )

    async def _stop_reducing(self) -> None:
        if self._reducing is not None:
            self.averaging.cancelled.set()
            # The task itself is not cancelled: its thread writes to *in* and reads the state until it sees the flag.
            await asyncio.wait({self._reducing})
            self._reducing = None

    async def _apply(self, certificate: Certificate) -> None:
        # A state that was being fetched is not needed any more.
        self._stop_fetching()
        assert self._work is not None and self.state is not None
        await self.averaging.commit(certificate, self._work, self.state)

    # States of other peers

    async def _fetch(self, path: Sequence[Certificate], donors: Sequence[str], timeout_s: float) -> None:
        head, known = path[-1].head, self.state or self._offered
        assert known is not None, "a worker comes first: it says how large the state is"
        try:
            self._fetched = await self._downloads.fetch(
                path, donors, sizes=known.sizes, have=self.state, timeout_s=timeout_s
            )
        except (PeersError, OSError, TimeoutError) as error:
            log.info("no state of epoch %d yet: %s", path[-1].plan.epoch, error or type(error).__name__)
            suspects = error.suspects if isinstance(error, StateUnavailable) else frozenset()
            self.post(events.FetchFailed(head, str(error)[:300], suspects))
        else:
            self.post(events.Fetched(head))

    def _stop_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def _adopt(self, certificate: Certificate) -> None:
        await self._stop_reducing()
        fetched, self._fetched = self._fetched, None
        old = self.state
        if fetched is not None and fetched.head == certificate.head:
            self.state = fetched
            # The codec's losses belong to the history of the other state.
            self.averaging.residuals = no_residuals(fetched)
        else:
            assert self._offered is not None and old is None
            await asyncio.to_thread(self._offered.certify, certificate)
            self.state = self._offered
        if old is not None and self._base is None and old.head != certificate.head:
            self._base = old.anchor
        self.averaging.commit_log.clear()

    async def _rebase(self) -> None:
        await self._stop_reducing()
        work, base, state = self._work, self._base, self.state
        if work is not None and base is not None and state is not None:
            await asyncio.to_thread(work.rebase, base, state.anchor)
        self._base = None

    # Answers to the worker

    async def _answer(self, answer: effects.Answer) -> None:
        state = self.state
        assert state is not None
        if answer.how == "begin":
            self._base = None
            beginning, self._beginning = self._beginning, None
            if beginning is not None:
                await beginning.settle(state.anchor, self._start(answer, state))
            return
        await self._stop_reducing()
        work, self._work = self._work, None
        assert work is not None
        if answer.how == "contributed" and self._base is not None:
            # The other members made the commit with this work, and this peer has fetched it.
            await asyncio.to_thread(work.shift_others, self._base, state.anchor)
            self._base = None
            work.contributors = [self.core.world_rank]
            await asyncio.to_thread(work.put_back, "contributed", state)
        elif answer.how in ("rebase", "keep"):
            await asyncio.to_thread(work.put_back, answer.how, state)
        failures = self.core.last_failures
        work.settle(
            answer,
            world_rank=self.core.world_rank,
            num_failures=len(failures),
            failures=list(failures),
            num_peers=self._num_peers,
            bandwidth=self.averaging.bandwidth.bytes_per_s,
        )

    def _start(self, answer: effects.Answer, state: OuterState) -> Start:
        return Start(
            world_rank=self.core.world_rank,
            epoch=answer.epoch,
            local_step=answer.local_step,
            epoch_s=answer.epoch_s,
            data_base=answer.data_base,
            anchor_digest=state.anchor_digest,
            head=state.head,
            num_peers=self._num_peers,
            keep_local=False,
        )

    @property
    def _num_peers(self) -> int:
        return 1 + len(self.core.swarm.live())


def _reduce_failed(plan: Plan, error: PeersError | OSError) -> events.ReduceFailed:
    """What the core is told: the peers by their ids, which a failed round names by world rank."""
    failure = error if isinstance(error, RoundFailed) else RoundFailed(str(error))
    names = {contributor.world_rank: contributor.peer_id for contributor in plan.contributors}
    suspects, told_by, offenders = (
        frozenset(names[rank] for rank in ranks if rank in names)
        for ranks in (failure.suspects, failure.told_by, failure.offenders)
    )
    return events.ReduceFailed(plan.digest, str(error)[:300], suspects, told_by, offenders)


def _offer_of(state: OuterState) -> Offer:
    header = state.header
    return Offer(anchor=header.anchor_digest, momentum=header.momentum_digest, certificate=header.certificate)
