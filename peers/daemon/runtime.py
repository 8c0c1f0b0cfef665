"""Carries out what the core decides, on asyncio and threads, and reports back. It decides nothing.

One task hands events to the core, one after the other, and carries out its effects in their order, each before the next
event: so state, round and messages never move under each other's feet. Reductions and downloads run beside it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from peers.core import effects, events
from peers.core.defaults import residual_decay_for
from peers.core.effects import Effect
from peers.core.peer import Peer
from peers.daemon.pledges import Pledges
from peers.daemon.reductions import Reductions
from peers.daemon.work import Beginning, WorkInHand
from peers.errors import PeersError, RoundFailed, StateUnavailable
from peers.protocol.certificates import Certificate, Plan, Work
from peers.protocol.messages import Message, Offer, Status
from peers.reduce.bandwidth import Bandwidth
from peers.reduce.commit_log import CommitLog, Recording
from peers.reduce.likeness import Likeness
from peers.reduce.residuals import Residuals
from peers.state.handover import Ahead, EpochOutcome, Memories, Start
from peers.state.outer_optimizer import OuterOptimizer, norm_of_pseudo_gradient
from peers.state.outer_state import OuterState
from peers.timing import COMMIT_S, FORGET_S

log = logging.getLogger(__name__)

_MOST_EVENTS = 4096
"""That wait: beyond, messages are dropped."""
_NEWCOMER_S = COMMIT_S
"""For so long after a peer was first heard, its download may be about to begin: commits are recorded for it."""


class Messenger(Protocol):
    """The part of the mesh that is needed here; both return at once."""

    def send_to(self, peer_id: str, message: Message) -> None: ...

    def broadcast(self, message: Message) -> None: ...


Download = Callable[[Sequence[Certificate], Sequence[str], float], Coroutine[Any, Any, OuterState]]
"""(path, donors, timeout_s) -> the state at the end of the path. Raises PeersError."""


@dataclass(frozen=True, kw_only=True)
class RuntimeSettings:
    codec: str
    local_steps: int
    optimizer_for: Callable[[int], OuterOptimizer]
    """By the number of contributors."""


class Runtime:
    """Owns the outer state of one peer, and the core that decides on it."""

    def __init__(
        self,
        core: Peer,
        *,
        settings: RuntimeSettings,
        messenger: Messenger,
        reductions: Reductions,
        pledges: Pledges,
        download: Download,
        on_change: Callable[[], None],
        on_tell: Callable[[effects.Tell], None],
    ) -> None:
        self.core, self.settings, self._messenger = core, settings, messenger
        self._reductions, self._pledges, self._download = reductions, pledges, download
        self._on_change, self._on_tell = on_change, on_tell
        self._events: asyncio.Queue[events.Event | Callable[[], Coroutine[Any, Any, events.Event | None]]] = (
            asyncio.Queue()
        )
        """Events, and what has to be done first to know one."""
        self._state: OuterState | None = None
        self._offered: OuterState | None = None
        self._fetched: OuterState | None = None
        self._base: list[Tensor] | None = None
        """The anchor that the worker's weights are based on, where the state has moved on without it."""
        self.residuals: list[Residuals] = []
        """What lossy codecs have kept back, by fragment."""
        self.commit_log = CommitLog()
        """For those who download the state meanwhile."""
        self._work: WorkInHand | None = None
        self._begin: Beginning | None = None
        self._reducing: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._bandwidth = Bandwidth()
        self.likeness = Likeness()
        self._last_status: Status | None = None
        self._expected: tuple[str, set[str]] = "", set()
        """A head, and the peers on it that streams were opened to ahead of its round."""
        self.num_failures = 0

    @property
    def state(self) -> OuterState | None:
        """This peer's outer state, once it has one of the run."""
        return self._state

    @property
    def bandwidth(self) -> float:
        """Bytes/s that this peer's link carries; 0: not known yet."""
        return self._bandwidth.bytes_per_s

    # What happens

    def post(self, event: events.Event) -> None:
        """What others say may be lost where there is too much of it, as on its way here."""
        if isinstance(event, events.Received) and self._events.qsize() >= _MOST_EVENTS:
            return

        self._events.put_nowait(event)

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this beside the loop, which an error in it ends."""
        task = asyncio.create_task(work)

        def has_ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:

                async def fail() -> None:
                    task.result()

                self._events.put_nowait(fail)

        task.add_done_callback(has_ended)
        return task

    async def begin_worker(
        self, inn: Sequence[Tensor], offered: OuterState, residuals: Sequence[Residuals] | None = None
    ) -> Start:
        """A worker is here: where it begins, once the run has a state, whose anchor is in `inn` then.

        `offered`: what it could begin from itself.
        """
        begin = Beginning(inn)

        async def arrive() -> events.Event:
            # Not before: a worker before it may still be answered.
            self._begin = begin
            if self._state is None and self._offered is None:
                self._offered = offered
                self.residuals = list(residuals) if residuals else _no_residuals(offered)
                self.post(events.StateOffered(_offer_of(offered)))
            return events.WorkerWaits()

        self._events.put_nowait(arrive)
        return await begin.start

    def is_offered(self, state: OuterState) -> bool:
        """Whether the run began from this one, that the worker offered."""
        return self._state is state

    async def average(
        self,
        memories: Memories,
        fragment: int,
        *,
        tokens: int,
        step: int,
        last: bool,
        ahead: asyncio.Future[Ahead],
    ) -> EpochOutcome:
        """What becomes of the fragment in *out*; what the worker goes on from is in *in* then. *Out* is only read.

        `ahead` gets its result where the worker is to train on meanwhile. Raises PeersError where nothing can become
        of it.
        """
        work = WorkInHand(memories, fragment, last=last, ahead=ahead)

        async def hand_over() -> events.Event | None:
            assert self._state is not None
            self._work = work
            if self._base is not None:
                await self._rebase()
            norm = await asyncio.to_thread(
                norm_of_pseudo_gradient,
                self._state.anchor[fragment],
                work.local,
                self.residuals[fragment].contribution_residual,
            )
            if not math.isfinite(norm):
                # The end of this worker's life, not of the daemon: its next one begins from the anchor.
                self._work = None
                reason = "this peer's weights are not finite any more; is the learning rate too high?"
                work.fail(PeersError(reason))
                return None
            work.propose_s = time.monotonic() - work.since
            return events.WorkReady(
                Work(tokens=tokens, norm=norm, step=step, based_on=0, last=last, bandwidth=self.bandwidth)
            )

        self._events.put_nowait(hand_over)
        try:
            return await work.answer
        finally:
            work.answer.cancel()

    # The loop

    async def run(self) -> None:
        """Work off events until cancelled. Raises PeersError where this peer cannot go on."""
        try:
            while True:
                event = await self._next_event()
                for effect in self.core.handle(event, time.monotonic()):
                    if not self._perform_at_once(effect):
                        await self._busy(self._perform(effect))
                self._expect_others()
                self._on_change()
                # Taking an event that is there already does not let anybody else run.
                await asyncio.sleep(0)
        finally:
            await self._stop_reducing()
            self._stop_fetching()

    def _expect_others(self) -> None:
        """Streams to those who are new on this head: a connection takes round trips, for which a round would wait."""
        core = self.core
        if core.phase != "training":
            return
        if self._expected[0] != core.head:
            self._expected = core.head, set()
        for peer_id, status in core.swarm.live():
            if status.head == core.head and peer_id not in self._expected[1]:
                self._expected[1].add(peer_id)
                self._reductions.expect(peer_id)

    async def _next_event(self) -> events.Event | None:
        wait_s = min(max(0.0, self.core.deadline - time.monotonic()), FORGET_S)
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that meets an event.
            async with asyncio.timeout(wait_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        return await self._busy(event()) if callable(event) else event

    async def _busy(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do this, and let the others know all the while that this peer is there."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self.core.timing.beat_s)
                if done:
                    return task.result()
                if self._last_status is not None:
                    self._messenger.broadcast(self._last_status)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _perform_at_once(self, effect: Effect) -> bool:
        """What takes no time; False: this does."""
        match effect:
            case effects.Send(peer_id, message):
                self._messenger.send_to(peer_id, message)
            case effects.Broadcast(message):
                if isinstance(message, Status):
                    self._last_status = message
                self._messenger.broadcast(message)
            case effects.CancelReduce():
                self._reductions.cancel()
            case effects.GoAhead(epoch, data_base):
                if self._work is not None and not self._work.ahead.done():
                    self._work.ahead.set_result(Ahead(epoch=epoch, data_base=data_base))
            case effects.Tell():
                log.info("%s", effect.text)
                self._on_tell(effect)
            case _:
                return False
        return True

    async def _perform(self, effect: Effect) -> None:
        match effect:
            case effects.Pledge(head, attempt):
                await asyncio.to_thread(self._pledges.add, head, attempt)
            case effects.Reduce(plan, timeout_s):
                await self._stop_reducing()
                self._reductions.begin()
                self._reducing = self._beside(self._reduce(plan, timeout_s))
            case effects.Apply(certificate):
                await self._apply(certificate)
            case effects.Fetch(path, donors, timeout_s):
                self._stop_fetching()
                self._fetching = self._beside(self._fetch(path, donors, timeout_s))
            case effects.Adopt(certificate):
                await self._adopt(certificate)
            case effects.Rebase():
                await self._rebase()
            case effects.Answer():
                await self._answer(effect)

    # Reductions

    async def _reduce(self, plan: Plan, timeout_s: float) -> None:
        work, state, digest = self._work, self._state, plan.digest
        assert work is not None and state is not None
        work.grouped_at = work.grouped_at or time.monotonic()
        work.clock.restart()
        work.previewed = None
        work.recording = Recording() if self._is_somebody_joining() else None
        names = {contributor.world_rank: contributor.peer_id for contributor in plan.contributors}
        try:
            report, header = await self._reductions.reduce(
                plan, work, state, self.residuals[work.fragment], timeout_s
            )
        except (PeersError, OSError) as error:
            failure = error if isinstance(error, RoundFailed) else RoundFailed(str(error))
            if not self._reductions.is_cancelled:
                log.info("attempt %d at epoch %d failed: %s", plan.attempt, plan.epoch, error)
                suspects, told_by, offenders = (
                    frozenset(names[rank] for rank in ranks if rank in names)
                    for ranks in (failure.suspects, failure.told_by, failure.offenders)
                )
                self.post(events.ReduceFailed(digest, str(error)[:300], suspects, told_by, offenders))
            return
        self._bandwidth.saw(report.bandwidth)
        work.sent_bytes += report.sent_bytes
        work.received_bytes += report.received_bytes
        work.previewed, work.parallel = header, report.parallel
        self.post(events.Reduced(digest, header.anchor_digest, header.momentum_digest))

    def _is_somebody_joining(self) -> bool:
        now_ns, lately_ns = time.time_ns(), int(_NEWCOMER_S * 1e9)
        # Either way: who is of a time to come would be a newcomer for ever.
        newcomers = (
            status
            for _, status in self.core.swarm.live()
            if status.phase in ("waiting", "fetching") and abs(now_ns - status.incarnation) < lately_ns
        )
        return self.commit_log.is_wanted or any(newcomers)

    async def _stop_reducing(self) -> None:
        if self._reducing is not None:
            self._reductions.cancel()
            # Not cancelled as a task: its thread writes into *in*, and reads the state, until it sees the flag.
            await asyncio.wait({self._reducing})
            self._reducing = None

    async def _apply(self, certificate: Certificate) -> None:
        """Anchor, momentum and certificate advance together, here and in `_adopt`, and nowhere else."""
        # A state that was being fetched is not wanted any more.
        self._stop_fetching()
        work, state, plan = self._work, self._state, certificate.plan
        assert work is not None and state is not None and work.plan is not None
        work.clock.lap("vote_s")
        parent = state.head
        await asyncio.to_thread(
            self.residuals[work.fragment].commit,
            work.plan,
            state.anchor[work.fragment],
            work.local,
            decay=residual_decay_for(self.settings.codec, self.settings.local_steps),
        )
        await asyncio.to_thread(
            self.settings.optimizer_for(len(plan.contributors)).commit,
            state,
            work.fragment,
            work.result,
            certificate=certificate,
            previewed=work.previewed,
            into=work.result,
        )
        self.commit_log.add(
            work.recording, parent=parent, head=certificate.head, state_numel=sum(state.sizes)
        )
        work.contributors = [contributor.world_rank for contributor in plan.contributors]
        self.likeness.committed(work.parallel)
        work.clock.lap("apply_s")

    # States of others

    async def _fetch(self, path: Sequence[Certificate], donors: Sequence[str], timeout_s: float) -> None:
        head = path[-1].head
        try:
            self._fetched = await self._download(path, donors, timeout_s)
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
        old = self._state
        if fetched is not None and fetched.head == certificate.head:
            self._state = fetched
            # What was lost on the way to another state has nothing to make up for on this one.
            self.residuals = _no_residuals(fetched)
        else:
            assert self._offered is not None and old is None
            await asyncio.to_thread(self._offered.certify, certificate)
            self._state = self._offered
        if old is not None and self._base is None and old.head != certificate.head:
            self._base = old.anchor
        self.commit_log.clear()

    async def _rebase(self) -> None:
        await self._stop_reducing()
        work, base, state = self._work, self._base, self._state
        if work is not None and base is not None and state is not None:
            await asyncio.to_thread(work.rebase, base, state.anchor)
        self._base = None

    async def _answer(self, answer: effects.Answer) -> None:
        state = self._state
        assert state is not None
        if answer.how == "begin":
            self._base = None
            begin, self._begin = self._begin, None
            if begin is not None and not begin.start.done():
                await begin.at(state.anchor)
                begin.settle(self._start(answer, state))
            return
        await self._stop_reducing()
        work, self._work = self._work, None
        assert work is not None
        if answer.how == "contributed" and self._base is not None:
            # Its commit was made by the others, and fetched.
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
            bandwidth=self.bandwidth,
        )

    def _start(self, answer: effects.Answer, state: OuterState) -> Start:
        return Start(
            world_rank=self.core.world_rank,
            epoch=answer.epoch,
            local_step=answer.local_step,
            data_base=answer.data_base,
            anchor_digest=state.anchor_digest,
            head=state.head,
            num_peers=self._num_peers,
            keep_local=False,
        )

    @property
    def _num_peers(self) -> int:
        return 1 + sum(1 for _ in self.core.swarm.live())


def _no_residuals(state: OuterState) -> list[Residuals]:
    return [Residuals(size) for size in state.sizes]


def _offer_of(state: OuterState) -> Offer:
    header = state.header
    return Offer(anchor=header.anchor_digest, momentum=header.momentum_digest, certificate=header.certificate)
