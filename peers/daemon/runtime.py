"""Carries out the core's effects on asyncio, and reports back what came of them. It decides nothing.

One task hands events to the core one at a time, and carries out all effects of an event, in order, before the next
event: nothing else changes the state, the round or the messages. Only reductions and downloads run in the background.
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
from peers.daemon.beginning import touch
from peers.daemon.downloads import Fetch
from peers.daemon.pledges import Pledges
from peers.errors import PeersError, RoundFailed, StateUnavailable
from peers.monitor.journal import printable
from peers.net.mesh import Mesh
from peers.protocol.certificates import Certificate, Plan
from peers.protocol.limits import MAX_SHORT_TEXT
from peers.protocol.messages import Offer, Status
from peers.reduce.copies import copy_into
from peers.reduce.residuals import Residuals
from peers.state.handover import Ahead, EpochOutcome, Start
from peers.state.outer_state import OuterState
from peers.timing import FORGET_S

log = logging.getLogger(__name__)

_MOST_EVENTS = 4096
"""Messages that arrive while so many events are waiting are dropped, as they may be on the network."""

Step = Callable[[], Coroutine[Any, Any, events.Event | None]]
"""Work that has to be done in its turn among the events. Returns the event that it results in, if any."""


class Runtime:
    """Owns one peer's outer state, and the core that decides about it."""

    def __init__(
        self,
        core: Peer,
        *,
        mesh: Mesh,
        averaging: Averaging,
        pledges: Pledges,
        fetch: Fetch,
        on_change: Callable[[], None],
        on_tell: Callable[[effects.Tell], None],
    ) -> None:
        """`on_change` is called after each event."""
        self.core = core
        self._events: asyncio.Queue[events.Event | Step] = asyncio.Queue()
        self._mesh = mesh
        self.averaging, self._pledges, self._fetch_state = averaging, pledges, fetch
        self._on_change, self._on_tell = on_change, on_tell
        self.state: OuterState | None = None
        """This peer's outer state, once it has one of the run. Only this class sets it."""
        self.status: Status | None = None
        """The last status that the core broadcast."""
        self._offered: OuterState | None = None
        """The state that this peer's first worker offers for the run to begin from; None once this peer has a state."""
        self._fetched: tuple[OuterState, Sequence[Certificate]] | None = None
        """A fetched state, and the certificates that lead to it."""
        self._base: list[Tensor] | None = None
        """The anchor on which the worker's weights are based, if another state was adopted since; else None."""
        self._work: WorkInHand | None = None
        self._beginning: tuple[Sequence[Tensor], asyncio.Task[None], asyncio.Future[Start]] | None = None
        """The *in* memories of a worker that waits to be told where it begins, and the answer to it."""
        self._reducing: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._expected: tuple[str, frozenset[str]] = "", frozenset()
        """A head, and the peers on it to which streams were opened ahead of its round."""
        self._is_log_needed = False
        """What the core was last told (events.LogNeeded)."""

    async def run(self) -> None:
        """Handle events until cancelled; then tell the others that this peer leaves. Raises PeersError where this peer
        cannot continue."""
        try:
            while True:
                event = await self._next_event()
                for each in (*self._news_of_joiners(), event):
                    for effect in self.core.handle(each, time.monotonic()):
                        await self._perform(effect)
                self._expect_others()
                self._on_change()
                # Taking an event that is already in the queue lets no other task run.
                await asyncio.sleep(0)
        finally:
            # Not through the queue: there may be no time for the events in it.
            for effect in self.core.handle(events.Leave(), time.monotonic()):
                await self._perform(effect)
            await self._stop_reducing()
            self._stop_fetching()

    def post(self, event: events.Event | Step) -> None:
        """Queue an event, or work during which no effect may be carried out."""
        is_message = isinstance(event, events.Received | events.StatusesReceived | events.StillHere)
        if not is_message or self._events.qsize() < _MOST_EVENTS:
            self._events.put_nowait(event)

    def _news_of_joiners(self) -> Sequence[events.LogNeeded]:
        """Evaluated before each event, of which a status of this peer is due at least every few seconds."""
        is_needed = self.state is not None and self.averaging.is_log_needed(sum(self.state.sizes))
        if is_needed is self._is_log_needed:
            return ()
        self._is_log_needed = is_needed
        return (events.LogNeeded(is_needed),)

    async def _next_event(self) -> events.Event | None:
        """The next event; None at the core's deadline."""
        wait_s = min(max(0.0, self.core.deadline - time.monotonic()), FORGET_S)
        try:
            # In Python 3.11 wait_for loses a cancellation that arrives together with an event.
            async with asyncio.timeout(wait_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        return await event() if callable(event) else event

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this beside the loop. An error in it ends the loop with that error."""
        task = asyncio.create_task(work)

        def has_ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:

                async def fail() -> None:
                    task.result()

                self.post(fail)

        task.add_done_callback(has_ended)
        return task

    # What the worker asks for

    @property
    def needs_offer(self) -> bool:
        """Whether no worker has offered a state yet from which the run could begin. Once False, it stays so."""
        return self.state is None and self._offered is None

    @property
    def run_is_alive(self) -> bool:
        """Whether this peer is in a run, or hears of one that exists."""
        return self.state is not None or self.core.hears_a_run

    @property
    def is_workers_base(self) -> bool:
        """Whether the worker's weights, while it has handed over nothing, are based on the anchor in `state`."""
        return self._base is None

    async def begin_worker(
        self, inn: Sequence[Tensor], offered: OuterState | None, residuals: Sequence[Residuals] | None = None
    ) -> Start:
        """Where a new worker begins, once the run has a state; the anchor is in its *in* memories (`inn`) then.

        The run begins from `offered` if it has no state yet, and the founders agree on this one.
        """
        start: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        # The page faults of new memory take seconds, which pass while the state is fetched.
        touched = asyncio.create_task(asyncio.to_thread(touch, inn))

        async def arrive() -> events.Event:
            # Set in its turn among the events: the previous worker may still be waiting for an answer.
            self._beginning = inn, touched, start
            if offered is not None and self.needs_offer:
                self._offered = offered
                self.averaging.residuals = list(residuals) if residuals else no_residuals(offered)
                header = offered.header
                offer = Offer(header.anchor_digest, header.momentum_digest, header.certificate)
                self.post(events.StateOffered(offer))
            return events.WorkerWaits()

        self.post(arrive)
        return await start

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

    async def _perform(self, effect: Effect) -> None:
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
                # The text may quote another peer's message.
                log.info("%s", printable(effect.text, 2 * MAX_SHORT_TEXT))
                self._on_tell(effect)
            case effects.Pledge(head, attempt):
                await asyncio.to_thread(self._pledges.add, head, attempt)
            case effects.Reduce(plan, timeout_s):
                await self._stop_reducing()
                self.averaging.cancelled.clear()
                self._reducing = self._in_background(self._reduce(plan, timeout_s))
            case effects.Apply(certificate):
                # A state that was being fetched is not needed any more.
                self._stop_fetching()
                assert self._work is not None and self.state is not None
                await self.averaging.commit(certificate, self._work, self.state)
            case effects.Fetch(path, donors, timeout_s):
                self._stop_fetching()
                self._fetching = self._in_background(self._fetch(path, donors, timeout_s))
            case effects.Adopt(certificate):
                await self._adopt(certificate)
            case effects.Rebase():
                await self._rebase()
            case effects.Answer():
                await self._answer(effect)

    def _expect_others(self) -> None:
        """Tell `averaging` who will likely be in the next round, if that has changed. Tell the mesh, too, if this peer
        leads the attempt, or the one that begins when this one fails: a leader sends messages to everybody."""
        core = self.core
        if core.phase not in ("training", "ready"):
            return
        # Live members count before they reach a new head: they come one by one.
        here = core.swarm.live_at(core.head).keys() | {p for p in core.swarm.roster if core.swarm.is_live(p)}
        leaders = {core.round.leader_of(core.round.attempt + later) for later in (0, 1)} if core.round else ()
        self._mesh.expect(frozenset(here) if core.me in leaders else frozenset())
        if core.phase != "training" or (now := (core.head, frozenset(here))) == self._expected:
            return
        self._expected = now
        ranks = {core.me: core.world_rank}
        ranks |= {p: status.world_rank for p in here if (status := core.swarm.status(p)) is not None}
        measured = {c.peer_id: c.work.bandwidth for c in core.chain.newest.plan.contributors}
        self.averaging.expect({p: measured.get(p, 0.0) for p in sorted(ranks, key=lambda p: ranks[p])})

    # Reductions

    async def _reduce(self, plan: Plan, timeout_s: float) -> None:
        work, state = self._work, self.state
        assert work is not None and state is not None
        try:
            header = await self.averaging.reduce(plan, work, state, timeout_s)
        except (PeersError, OSError) as error:
            if not self.averaging.cancelled.is_set():
                log.info("attempt %d at epoch %d failed: %s", plan.attempt, plan.epoch, error)
                self.post(_reduce_failed(plan, error))
        else:
            self.post(events.Reduced(plan.digest, header.anchor_digest, header.momentum_digest))

    async def _stop_reducing(self) -> None:
        if self._reducing is not None:
            self.averaging.cancelled.set()
            # The task itself is not cancelled: its thread writes to *in* and reads the state until it sees the flag.
            await asyncio.wait({self._reducing})
            self._reducing = None

    # States of other peers

    async def _fetch(self, path: Sequence[Certificate], donors: Sequence[str], timeout_s: float) -> None:
        task, head, known = asyncio.current_task(), path[-1].head, self.state or self._offered
        assert known is not None, "a worker comes first: it says how large the state is"
        fetched: tuple[OuterState, Sequence[Certificate]] | None = None
        event: events.Event = events.Fetched(head)
        try:
            # A newcomer that missed the founding may already hold the state, or most of it, in what it offers.
            fetched = await self._fetch_state(path, donors, known, timeout_s), path
        except (PeersError, OSError, TimeoutError) as error:
            log.info("no state of epoch %d yet: %s", path[-1].plan.epoch, str(error) or type(error).__name__)
            suspects = error.suspects if isinstance(error, StateUnavailable) else frozenset()
            event = events.FetchFailed(head, str(error)[:300], suspects)

        async def end() -> events.Event | None:
            # An earlier event may have stopped this fetch: then nobody wants its state.
            if self._fetching is not task:
                return None
            self._fetched = fetched
            return event

        self.post(end)

    def _stop_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def _adopt(self, certificate: Certificate) -> None:
        await self._stop_reducing()
        fetched, self._fetched = self._fetched, None
        old = self.state
        if fetched is not None and fetched[0].head == certificate.head:
            self.state, path = fetched
            if old is not None and old.head in (path[0].plan.parent, path[0].head):
                self.averaging.forget_residuals_of([c for c in path if c.head != old.head])
            else:
                # The residuals belong to the history of the old state.
                self.averaging.residuals = no_residuals(self.state)
        else:
            assert self._offered is not None and old is None
            await asyncio.to_thread(self._offered.certify, certificate)
            self.state = self._offered
        self._offered = None
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
            if self._beginning is not None:
                (inn, touched, start), self._beginning = self._beginning, None
                # The worker may have died meanwhile.
                if not start.done():
                    await touched
                    for memory, values in zip(inn, state.anchor, strict=True):
                        await asyncio.to_thread(copy_into, memory, values)
                if not start.done():
                    start.set_result(self._start(answer, state))
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
            num_peers=1 + len(self.core.swarm.live()),
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
            num_peers=1 + len(self.core.swarm.live()),
            keep_local=False,
        )


def _reduce_failed(plan: Plan, error: PeersError | OSError) -> events.ReduceFailed:
    """The event for the core, with the ids of the peers that the error names by world rank."""
    failure = error if isinstance(error, RoundFailed) else RoundFailed(str(error))
    names = {contributor.world_rank: contributor.peer_id for contributor in plan.contributors}
    suspects, told_by, offenders = (
        frozenset(names[rank] for rank in ranks if rank in names)
        for ranks in (failure.suspects, failure.told_by, failure.offenders)
    )
    return events.ReduceFailed(plan.digest, str(error)[:300], suspects, told_by, offenders)
