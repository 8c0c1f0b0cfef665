"""Carries out what the round decides: reduces, commits, catches up, and answers the worker.

One task works off events in order, so that state, round and messages never move under each other's feet. Everything
that takes long (the reduction, the outer step) runs in a thread; everything that waits has a deadline.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers import membership
from peers.codecs import codec_named
from peers.donors import Donors, Download
from peers.errors import PeersError, ProtocolError, RoundFailed
from peers.handover import Memories, Outcome
from peers.late_work import LateWork
from peers.literature import residual_decay_for
from peers.mesh import Mesh
from peers.network.streams import StreamPool
from peers.outer_optimizer import OuterOptimizer, norm_of_pseudo_gradient
from peers.outer_state import Digests, OuterState
from peers.pace import progress_of_others
from peers.records import Announcement
from peers.reduce import OVERLAPPED_NICENESS
from peers.reduction.bandwidth import Bandwidth
from peers.reduction.residuals import Residuals
from peers.round import messages as round_messages
from peers.round.absences import Absences
from peers.round.actions import Action, Apply, Cancel, CatchUp, Inspect, Reduce, Send
from peers.round.aggregation import Aggregation
from peers.round.attempts import ATTEMPT_SHARE, Attempts
from peers.round.audit import demanded
from peers.round.audit_exchange import AuditTask
from peers.round.deadlines import Deadlines
from peers.round.leader import Timing, is_carried
from peers.round.messages import Ask, Audit, Commit, Group, Join, Proposal, RoundMessage, Vote
from peers.round.offences import Offences
from peers.round.readiness import Readiness
from peers.round.recent_commits import RecentCommits
from peers.round.standing import Standing
from peers.rounds import Round
from peers.schedule import Schedule
from peers.state.commit_log import CommitLog, Recording, header_of

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_TICK_S = (0.02, 1.0)
_MAX_EARLY = 4096
_NEWCOMER_S = 60
_MAX_UNREAD = 64
"""Messages of one peer that wait while this one commits or catches up; what comes then is lost, and said again."""

Event = Callable[[float], list[Action]]


@dataclass(kw_only=True)
class AveragingSettings:
    schedule: Schedule
    codec: str
    deadlines: Deadlines
    aggregation: Aggregation = field(default_factory=Aggregation)


class Averager:
    """Owns the outer state of one peer and the rounds on it, one at a time."""

    def __init__(
        self,
        *,
        me: int,
        incarnation: int,
        settings: AveragingSettings,
        mesh: Mesh,
        pool: StreamPool,
        optimizer_for: Callable[[int], OuterOptimizer],
        view: Callable[[], Mapping[int, Announcement]],
        download: Download,
        changed: Callable[[], None],
        forwarded_bytes: Callable[[], int] = lambda: 0,
        has_worker: Callable[[], bool] = lambda: True,
    ) -> None:
        """`has_worker`: whether the worker lives that has handed over what is averaged."""
        self._me, self._incarnation, self._settings = me, incarnation, settings
        self._mesh, self.optimizer_for = mesh, optimizer_for
        self._newest_view, self._changed = view, changed
        self._donors = Donors(me, self._view, download)
        self._attempts = Attempts(
            me=me,
            codec=settings.codec,
            aggregation=settings.aggregation,
            niceness=OVERLAPPED_NICENESS if settings.schedule.overlap_steps else 0,
            pool=pool,
            optimizer_for=optimizer_for,
            view=self._view,
            quiet=lambda: self._mesh.quiet,
            forwarded_bytes=forwarded_bytes,
        )
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._num_unread: Counter[int] = Counter()
        self._early: deque[tuple[int, RoundMessage]] = deque(maxlen=_MAX_EARLY)
        self._waiting: Readiness | None = None
        self._commits = RecentCommits()
        self._late = LateWork(settings.schedule, has_worker)
        self._offences = Offences()
        self._absences = Absences()
        self._num_left_out = 0
        self._reducing: asyncio.Task[None] | None = None
        self._chance = random.SystemRandom()
        self._epoch_started = time.monotonic()
        self._bandwidth = Bandwidth()
        self._state: OuterState | None = None
        self.commit_log = CommitLog()
        """For those who download the state meanwhile."""
        self.residuals: list[Residuals] = []
        """What lossy codecs have kept back, by fragment."""
        self._round: Round | None = None

    @property
    def state(self) -> OuterState:
        assert self._state is not None, "the daemon has no state before its worker has offered one"
        return self._state

    @property
    def has_state(self) -> bool:
        return self._state is not None

    @property
    def led_by(self) -> int:
        """Who led the commit that this state came of; -1: not made by this peer."""
        newest = self._commits.newest
        return -1 if newest is None else newest.group.leader

    @property
    def standing(self) -> Standing:
        """Where this peer is in its round, for people."""
        return self._round.standing if self._round else Standing()

    @property
    def bandwidth(self) -> float:
        """Bytes/s that this peer's link carries; 0: not known yet."""
        return self._bandwidth.bytes_per_s

    def adopt(self, state: OuterState, residuals: Sequence[Residuals] | None = None) -> None:
        """Take this state as the current one and open the round on it.

        `residuals` (of each fragment) are this peer's own from when it was last on this very state; else it has none.
        """
        if self._state is not None and state is not self._state:
            trainers = membership.trainers_of(self._view(), state.lineage)
            self._late.set_aside(self._state, state, trainers, brings=False)
        self._take(state, residuals)
        self._commits.clear()
        self._open_round()

    def _take(self, state: OuterState, residuals: Sequence[Residuals] | None = None) -> None:
        # What was lost on the way to another state has nothing to make up for on this one.
        self._state = state
        self.commit_log.clear()
        self.residuals = list(residuals) if residuals else [Residuals(size) for size in state.sizes]

    async def run(self) -> None:
        """Work off events until cancelled."""
        try:
            while True:
                for action in await self._next_actions():
                    await self._perform(action)
        finally:
            await self._stop_reducing()

    async def average(
        self, memories: Memories, fragment: int, *, tokens: int, step: int, last: bool
    ) -> Outcome:
        """Average the fragment in *out* in; what its weights have become is then in *in*.

        *Out* is only read. `tokens` counts what was trained since this peer's work on the fragment was last in a
        commit.
        """
        if fragment != self._settings.schedule.fragment_of(self.state.epoch):
            raise ProtocolError(f"fragment {fragment} is not the one of epoch {self.state.epoch}")
        tokens += self._late.carried_tokens(fragment)
        proposal = Proposal(self._me, tokens, 0.0, step, last, self.bandwidth)
        # From here on, or a worker that starts meanwhile would begin on weights that a commit is about to replace.
        waiting = self._waiting = Readiness(memories, fragment, proposal)
        try:
            await self._make_proposal(waiting)
            self._changed()
            self._propose()
            return await waiting.answer
        finally:
            self._waiting = None
            waiting.answer.cancel()

    async def await_new_worker(self) -> None:
        """Until nothing is being averaged of the one before; what was left in its weights is gone with it."""
        while self._waiting is not None:
            await asyncio.wait({self._waiting.answer})
            await asyncio.sleep(0)
        self._late.worker_is_gone()

    def _view(self) -> membership.View:
        view, last = self._newest_view(), self._commits.newest
        if last is None:
            return view
        return membership.after_commit(view, last.group.ranks, last.lineage, view[self._me])

    def view_changed(self) -> None:
        def event(now: float) -> list[Action]:
            if self._round is None:
                return []
            view = self._credible_view()
            self._late.branch.left([rank for rank, peer in view.items() if peer.state == "leaving"])
            return self._round.on_view(view, now, self._mesh.quiet, self._mesh.lost)

        self._post(event)

    def received(self, sender: int, message: RoundMessage) -> None:
        """A round message from a live peer."""
        if self._num_unread[sender] >= _MAX_UNREAD:
            return
        self._num_unread[sender] += 1

        def event(now: float) -> list[Action]:
            self._num_unread[sender] -= 1
            return self._route(sender, message, now)

        self._post(event)

    # Events

    def _post(self, event: Event) -> None:
        self._events.put_nowait(event)

    def _propose(self) -> None:
        def event(now: float) -> list[Action]:
            waiting = self._waiting
            self._allow_for_the_first_epoch()
            return self._round.on_ready(waiting.proposal, now) if self._round and waiting else []

        self._post(event)

    async def _next_actions(self) -> list[Action]:
        now = time.monotonic()
        due = self._round.deadline - now if self._round else _TICK_S[1]
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that meets an event.
            async with asyncio.timeout(min(max(due, _TICK_S[0]), _TICK_S[1])):
                event = await self._events.get()
        except TimeoutError:
            return self._round.on_tick(time.monotonic()) if self._round else []
        now = time.monotonic()
        actions = event(now)
        if self._round and now >= self._round.deadline:
            # However many events there are, none of them holds up the deadlines.
            actions += self._round.on_tick(now)
        return actions

    def _route(self, sender: int, message: RoundMessage, now: float) -> list[Action]:
        if self._round is None:
            return []
        lineage = message.lineage
        if lineage == self._round.lineage:
            self._allow_for_the_first_epoch()
            return self._round.on_message(sender, message, now)
        if (commit := self._commits.on(lineage)) is not None:
            # Only what asks for an answer gets one; a late vote or commit is settled already.
            return [Send(sender, commit)] if isinstance(message, (Join, Ask)) else []
        if isinstance(message, Join):
            self._early.append((sender, message))
        return []

    def _open_round(self) -> None:
        state = self.state
        self._round = Round(
            me=self._me,
            incarnation=self._incarnation,
            fragment=self._settings.schedule.fragment_of(state.epoch),
            epoch=state.epoch,
            lineage=state.lineage,
            parent=state.header.parent,
            timing=self._timing(),
            view=self._credible_view(),
            quiet=self._mesh.quiet,
            lost=self._mesh.lost,
            first_step=state.epoch * self._settings.schedule.steps_per_epoch,
            aggregation=self._settings.aggregation,
            barred=[
                rank
                for rank, peer in self._view().items()
                if self._offences.is_barred(peer.peer_id, state.epoch)
            ],
            unawaited=self._absences.unawaited(self._view(), state.epoch),
            num_left_out=self._num_left_out,
        )
        for _ in range(len(self._early)):
            sender, message = self._early.popleft()
            self.received(sender, message)
        self._epoch_started = time.monotonic()
        self._changed()

    def _credible_view(self) -> membership.View:
        return self._donors.credible_view(self.state.lineage)

    def _allow_for_the_first_epoch(self) -> None:
        """Where no epoch is known, the time until somebody is ready tells by how much others may be later."""
        if self._round and not self._round.has_begun and not self._settings.deadlines.knows_epochs:
            self._round.timing = self._timing(time.monotonic() - self._epoch_started)

    def _timing(self, epoch_so_far_s: float = 0.0) -> Timing:
        numel = self.state.sizes[self._settings.schedule.fragment_of(self.state.epoch)]
        wire_bytes = 2 * codec_named(self._settings.codec).encoded_bytes(numel)
        return self._settings.deadlines.timing(wire_bytes, epoch_so_far_s)

    # Actions

    async def _perform(self, action: Action) -> None:
        match action:
            case Send(rank, message):
                self._mesh.send(rank, round_messages.to_message(message))
            case Reduce(group):
                await self._begin(self._reduce(group))
            case Inspect(group, audit):
                await self._begin(self._inspect(group, audit))
            case Cancel():
                self._attempts.cancel()
            case Apply(commit):
                await self._apply(commit)
            case CatchUp():
                await self._stop_reducing()
                await self._catch_up(action)

    async def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        await self._stop_reducing()
        self._attempts.begin()
        self._reducing = asyncio.create_task(work)

    async def _stop_reducing(self) -> None:
        if self._reducing is not None:
            self._attempts.cancel()
            # Not cancelled as a task: its thread still writes into *in* until it sees the flag.
            await self._reducing
            self._reducing = None

    async def _reduce(self, group: Group) -> None:
        """Reduce, and say how it went."""
        waiting, round_ = self._waiting, self._round
        assert waiting is not None and round_ is not None
        waiting.grouped_at = waiting.grouped_at or time.monotonic()
        waiting.clock.restart()
        waiting.previewed = None
        waiting.recording = Recording() if self._is_somebody_joining() else None
        try:
            report, header = await self._attempts.reduce(
                group,
                waiting,
                self.state,
                self.residuals[waiting.fragment],
                round_.timing,
            )
        except (PeersError, OSError) as error:
            lost = _as_failure(error)
            if not self._attempts.is_cancelled:
                log.info("attempt at epoch %d failed: %s", group.epoch, error)
                self._learn_from_failure(waiting.clock.total_s, round_)
            self._post(
                lambda now: round_.on_reduce_failed(group.attempt, lost.suspects, now, told_by=lost.told_by)
            )
            return
        self._bandwidth.saw(report.bandwidth)
        waiting.sent_bytes += report.sent_bytes
        waiting.received_bytes += report.received_bytes
        waiting.previewed = header
        vote = Vote(
            group.fragment,
            group.lineage,
            group.attempt,
            report.share_digests,
            header.anchor_digest,
            header.momentum_digest,
            sent=report.sent_digests,
            received=report.received_digests,
            audit=demanded(group, self._me, self._settings.aggregation.audit, self._chance),
        )
        self._post(lambda now: round_.on_reduced(group.attempt, vote, now))

    async def _inspect(self, group: Group, audit: Audit) -> None:
        """Reduce others' shares again, and say what came of it."""
        waiting, round_ = self._waiting, self._round
        assert waiting is not None and waiting.plan is not None and round_ is not None
        place = {rank: index for index, rank in enumerate(group.ranks)}
        task = AuditTask(waiting.plan, [place[owner] for owner in audit.owners], audit.inputs)
        disproved = frozenset[int]()
        try:
            disproved = await self._attempts.audit(
                task,
                waiting,
                self.state,
                self.residuals[waiting.fragment],
                round_.timing,
            )
        except (PeersError, OSError) as error:
            log.info("audit at epoch %d failed: %s", group.epoch, error)
            lost = _as_failure(error)
            self._post(
                lambda now: round_.on_audit_failed(
                    group.attempt, lost.suspects, (), now, told_by=lost.told_by
                )
            )
            return
        if disproved:
            log.warning("the sums of peer %s are false", ", ".join(map(str, sorted(disproved))))
            self._post(lambda now: round_.on_audit_failed(group.attempt, (), disproved, now))
        else:
            self._post(lambda now: round_.on_audited(group.attempt, now))

    def _is_somebody_joining(self) -> bool:
        """Or is about to: what is recorded takes memory, so one that never gets to it is not minded for long."""
        since_ns = time.time_ns() - _NEWCOMER_S * 1_000_000_000
        newcomers = (
            peer
            for peer in self._view().values()
            if peer.state in ("joining", "waiting") and peer.incarnation > since_ns
        )
        return self.commit_log.is_wanted or any(newcomers)

    def _learn_from_failure(self, seconds: float, round_: Round) -> None:
        """An attempt that nobody broke off but its deadline tells that rounds take longer now than they used to."""
        if seconds >= ATTEMPT_SHARE * round_.timing.attempt_s:
            self._settings.deadlines.attempt_timed_out(seconds)
            round_.timing = self._timing()

    async def _apply(self, commit: Commit) -> None:
        """Anchor, momentum, epoch, lineage and data cursor advance together, here and nowhere else."""
        waiting, group = self._waiting, commit.group
        assert waiting is not None
        state, schedule = self.state, self._settings.schedule
        view = self._view()
        self._absences.note(view, membership.trainers_of(view, state.lineage), group.ranks)
        if self._round is None or self._round.is_led_by_first:
            self._num_left_out = 0
        waiting.clock.lap("vote_s")
        assert waiting.plan is not None and waiting.plan.attempt.hex() == group.attempt
        await asyncio.to_thread(
            self.residuals[waiting.fragment].commit,
            waiting.plan,
            state.anchor[waiting.fragment],
            waiting.local,
            decay=residual_decay_for(self._settings.codec, schedule.local_steps),
        )
        await asyncio.to_thread(
            self._late.branch.committing,
            group.ranks,
            state.lineage,
            waiting.fragment,
            waiting.result,
            tokens=waiting.proposal.tokens,
        )
        # Every token is in the work on each of the fragments.
        tokens, parent = group.tokens // schedule.num_fragments, state.lineage
        digests = await asyncio.to_thread(
            self.optimizer_for(len(group.ranks)).commit,
            state,
            waiting.fragment,
            waiting.result,
            tokens=tokens,
            data_width=group.data_width,
            previewed=waiting.previewed,
            into=waiting.result,
        )
        if (digests.anchor, digests.momentum) != (commit.anchor, commit.momentum):
            raise PeersError("the outer step is not the one that was voted for: a bug; restart this peer")
        self._commits.add(commit)
        header = header_of(
            waiting.plan,
            parent=parent,
            lineage=state.lineage,
            fragment=waiting.fragment,
            tokens=tokens,
            data_width=group.data_width,
        )
        self.commit_log.add(waiting.recording, header, sum(state.sizes))
        now = time.monotonic()
        deadlines, round_ = self._settings.deadlines, self._round
        grouped_at, first_step = waiting.grouped_at or now, group.epoch * schedule.steps_per_epoch
        is_early = is_carried(waiting.proposal, first_step)
        deadlines.epoch_took(
            now - self._epoch_started,
            of_it_round_s=now - grouped_at,
            trained_s=0.0 if is_early else waiting.since - self._epoch_started,
            steps_s=schedule.steps_per_epoch * view[self._me].step_s,
        )
        waiting.clock.lap("apply_s")
        failures = round_.failures if round_ else []
        if round_ is not None and round_.gathered is not None:
            deadlines.gathered(round_.gathered.seconds, complete=not round_.gathered.missing)
        self._remember_offenders(group.epoch)
        self._late.is_in(waiting)
        self._answer(waiting, contributors=list(group.ranks), local_step=0, failures=failures)
        self._open_round()

    def _remember_offenders(self, epoch: int) -> None:
        view, round_ = self._view(), self._round
        if round_ is None:
            return
        offenders = {view[rank].peer_id: rank for rank in round_.offenders if rank in view}
        proven = [peer_id for peer_id, rank in offenders.items() if rank in round_.proven]
        for peer_id, term in self._offences.note(offenders, epoch, proven).items():
            log.warning(
                "peer %d (%s) is left out of the next %d epochs, %s; the last time: %s",
                offenders[peer_id],
                peer_id,
                term,
                "for false sums" if peer_id in proven else "having spoilt several rounds",
                round_.failures[-1] if round_.failures else "in an audit",
            )

    async def _catch_up(self, action: CatchUp) -> None:
        """Adopt the better state, and propose the local work again on top of it: new anchor + (local - old anchor)."""
        log.info("catching up: %s", action.reason)
        waiting, old = self._waiting, self.state
        new = await self._better_state(action)
        if (
            new is not None
            and self._round is not None
            and action.resync
            and await asyncio.to_thread(_is_whole, old, new)
        ):
            # Its bits were right: who sends it to fetch them again only keeps it from the round.
            self._round.offenders.add(action.rank)
        self._remember_offenders(old.epoch)
        if new is None:
            # Whoever was ahead is gone, or cannot prove it: our own state is the best there is.
            self._open_round()
            self._propose()
            return
        if waiting is not None:
            self._num_left_out = 0 if action.contributed else self._num_left_out + 1
        brings = waiting is not None and not action.contributed and not waiting.proposal.last
        trainers = membership.trainers_of(self._view(), new.lineage)
        aside = self._late.set_aside(old, new, trainers, brings=brings)
        self._take(new)
        self._commits.clear()
        if waiting is None:
            self._open_round()
            return
        await asyncio.to_thread(waiting.shift_others, old, new)
        schedule, fragment = self._settings.schedule, waiting.fragment
        entry: int | None = None
        if brings:
            await self._late.carry_over(waiting, old, new, aside)
            if schedule.fragment_of(new.epoch) == fragment:
                if new.epoch > old.epoch:
                    entry = self._late.ride(self._view(), new.lineage, self._me, self._mesh.ages)
                if entry is None:
                    await self._make_proposal(waiting)
                    self._open_round()
                    self._propose()
                    return
            # The work rides along: until it is this fragment's turn again, or the others have done this epoch's steps.
            waiting.result.copy_(waiting.local)
        else:
            # Its work is in, or comes too late for any epoch: go on from where the others are.
            waiting.result.copy_(new.anchor[fragment])
            self._late.is_in(waiting, is_lost=not action.contributed)
        if entry is None:
            steps = schedule.steps_per_epoch
            entry = progress_of_others(self._view(), new.lineage, self._me, steps, self._mesh.ages)
        contributors = [self._me] if action.contributed else []
        self._answer(waiting, contributors=contributors, local_step=entry)
        self._open_round()

    async def _better_state(self, action: CatchUp) -> OuterState | None:
        """The state to adopt, as soon as somebody hands it over; None where nobody is ahead any more."""
        while True:
            view = self._credible_view()
            target = membership.ahead_of(view, self._me) or view.get(action.rank)
            if target is None or (target.lineage == self.state.lineage and not action.resync):
                return None
            if (state := await self._donors.hand_over(target, self.state.lineage)) is not None:
                return state
            if membership.ahead_of(self._credible_view(), self._me) is None:
                return None
            await asyncio.sleep(_RETRY_S)

    async def _make_proposal(self, waiting: Readiness) -> None:
        """What the worker's weights bring to a round on the current anchor."""
        norm = await asyncio.to_thread(
            norm_of_pseudo_gradient,
            self.state.anchor[waiting.fragment],
            waiting.local,
            self.residuals[waiting.fragment].contribution,
        )
        if not math.isfinite(norm):
            raise PeersError("this peer's weights are not finite any more; is the learning rate too high?")
        waiting.proposal = dataclasses.replace(waiting.proposal, norm=norm)
        waiting.propose_s = time.monotonic() - waiting.since

    def _answer(
        self, waiting: Readiness, *, contributors: list[int], local_step: int, failures: Sequence[str] = ()
    ) -> None:
        waiting.settle(
            self.state,
            contributors=contributors,
            local_step=local_step,
            num_failures=len(failures),
            failures=list(failures),
            num_peers=len(self._view()),
            bandwidth=self.bandwidth,
        )


def _as_failure(error: PeersError | OSError) -> RoundFailed:
    """With whom it was lost to, where that is known."""
    return error if isinstance(error, RoundFailed) else RoundFailed(str(error))


def _is_whole(old: OuterState, new: OuterState) -> bool:
    """Whether the old one is the new one already, by its values and not by what its header says of them."""
    return old.verify() == Digests(new.anchor_digest, new.momentum_digest)
