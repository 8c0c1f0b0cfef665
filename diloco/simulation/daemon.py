"""One life of one peer: carries out what its rounds decide, as peers/averaging.py does, in simulated time.

The round (peers/rounds.py), who leads it, its deadlines, its messages and the shares of the reduction are the
product's. What takes time there takes time here: the reduction by the links and processors, the rest by the machine's
paces. While a commit is applied or a state comes, other events wait, as they do in the daemon.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from peers.round.attempts import ATTEMPT_SHARE

from diloco.simulation.board import NEWS
from diloco.simulation.figures import EpochOfPeer
from diloco.simulation.reduction import FP32_BYTES, Reduced, Reduction
from diloco.simulation.round_driver import RoundDriver
from diloco.simulation.state import Piece, State, announcement_of
from diloco.simulation.worker import Answer, Work, Worker
from peers import membership
from peers.codecs import codec_named
from peers.reduction.bandwidth import WINDOW_S, Bandwidth
from peers.round.actions import Action, Apply, Cancel, CatchUp, Reduce, Send
from peers.round.deadlines import Deadlines
from peers.round.leader import Timing, is_carried
from peers.round.messages import Commit, Group, Proposal, Vote
from peers.rounds import Round
from peers.state.header import STATE_CHUNK_NUMEL

if TYPE_CHECKING:
    from diloco.simulation.swarm import SimulatedSwarm

_RESENT_PER_PEER_S = 0.05
"""Members repeat themselves more rarely in large swarms: no message is lost here, so it is only work to compute."""


class Daemon:
    """`is_running` ends with this life."""

    def __init__(self, swarm: SimulatedSwarm, rank: int, incarnation: int) -> None:
        scenario = swarm.scenario
        self.swarm, self.clock, self.rank, self.incarnation = swarm, swarm.clock, rank, incarnation
        self.is_running = True
        self.plan = scenario.peers[rank]
        self.state: State | None = None
        self.standing = announcement_of(rank, incarnation, State(), "joining")
        self.worker = Worker(
            clock=self.clock,
            schedule=scenario.schedule,
            step_s=self.plan.step_s,
            jitter=scenario.jitter,
            machine=self.plan.machine,
            chance=swarm.chance_of(rank, incarnation),
            fragment_bytes=lambda epoch: FP32_BYTES * scenario.fragment_sizes[self._fragment_of(epoch)],
            hand_over=self._handed_over,
            merged=self._merged,
        )
        self._deadlines = Deadlines(averaging_timeout_s=scenario.averaging_timeout_s)
        self.rounds = RoundDriver(
            self.clock, self._view, lambda: swarm.board.quiet, self._perform, self._allow_for_the_first_epoch
        )
        self._piece: Piece | None = None
        self._reduction: Reduction | None = None
        self._epoch_began_at = 0.0
        self._bandwidth = Bandwidth()
        self._ended: EpochOfPeer | None = None
        self._is_riding = False

    # Life

    def begin(self, state: State, local_step: int) -> None:
        """Train on this state, as one of the swarm."""
        self.state = state
        self.post_standing("training")
        self.swarm.letters.receivers[self.rank] = self.rounds.received
        self._open_round()
        self.worker.begin(state.epoch, local_step)

    def stop(self) -> None:
        """The machine is lost."""
        self.is_running = False
        self.rounds.stop()
        self.worker.stop()
        self.swarm.letters.receivers.pop(self.rank, None)
        if self._reduction is not None:
            self._reduction.lose(self.rank)

    def post_standing(self, standing: str, cause: str = NEWS) -> None:
        """On the board, once what this peer has sent before is on its way: the others hear of it in that order."""
        assert self.state is not None
        announcement = self.standing = announcement_of(self.rank, self.incarnation, self.state, standing)

        def post() -> None:
            if self.is_running and announcement is self.standing:
                self.swarm.board.post(announcement, cause)

        if (gone_at := self.swarm.letters.gone_at(self.rank)) > self.clock.now:
            self.clock.at(gone_at, post)
        else:
            post()

    # The worker's side

    def _handed_over(self, work: Work) -> None:
        assert self.state is not None
        fragment, scenario = self._fragment_of(self.state.epoch), self.swarm.scenario
        tokens = work.steps * scenario.tokens_per_step
        step = scenario.schedule.nominal_step(self.state.epoch, self.worker.local_step, None)
        proposal = Proposal(self.rank, tokens, 1.0, step, False, self._bandwidth.bytes_per_s)
        self._piece = Piece(work, fragment, self.clock.now, proposal)
        self._later(self._seconds(self.plan.machine.propose) + 2 * self.plan.machine.hop_s, self._propose)

    def _propose(self) -> None:
        if self._piece is None or self.state is None:
            return
        self._piece.parts.propose_s = self.clock.now - self._piece.since
        if self.swarm.newest.epoch > self.state.epoch:
            # Behind the others, who may wait for it.
            self.post_standing("averaging")
        piece, round_ = self._piece, self.rounds.round

        def ready(now: float) -> list[Action]:
            self._allow_for_the_first_epoch()
            return round_.on_ready(piece.proposal, now) if round_ else []

        self.rounds.post(ready)

    def _merged(self, at: float, blocked_s: float) -> None:
        if self._ended is not None:
            self._ended.at, self._ended.parts.blocked_s = at, blocked_s
            self._ended = None
        self.clock.at(at, self.swarm.look_for_the_end)

    # The round

    def _open_round(self) -> None:
        assert self.state is not None
        state = self.state
        now_open = Round(
            me=self.rank,
            incarnation=self.incarnation,
            fragment=self._fragment_of(state.epoch),
            epoch=state.epoch,
            lineage=state.lineage,
            parent=state.parent,
            timing=self._timing(),
            view=self._view(),
            quiet=self.swarm.board.quiet,
            first_step=state.epoch * self.swarm.scenario.schedule.steps_per_epoch,
        )
        self.rounds.open(now_open)
        self._epoch_began_at = self.clock.now

    def _view(self) -> membership.View:
        return self.swarm.board.view(self.standing, self.rounds.commits.newest)

    def _allow_for_the_first_epoch(self) -> None:
        round_ = self.rounds.round
        if round_ is not None and not round_.has_begun and not self._deadlines.knows_epochs:
            round_.timing = self._timing(self.clock.now - self._epoch_began_at)

    def _timing(self, epoch_so_far_s: float = 0.0) -> Timing:
        assert self.state is not None
        scenario = self.swarm.scenario
        numel = scenario.fragment_sizes[self._fragment_of(self.state.epoch)]
        timing = self._deadlines.timing(2 * codec_named(scenario.codec).encoded_bytes(numel), epoch_so_far_s)
        resend_s = max(timing.resend_s, _RESENT_PER_PEER_S * len(scenario.peers))
        return dataclasses.replace(timing, resend_s=resend_s)

    # Actions

    def _perform(self, action: Action) -> None:
        match action:
            case Send(rank, message):
                self.swarm.letters.send(self.rank, rank, message)
            case Reduce(group):
                self._stop_reducing()
                self._reduce(group)
            case Cancel():
                self._stop_reducing()
            case Apply(commit):
                self._apply(commit)
            case CatchUp():
                self._stop_reducing()
                self._catch_up(action)

    def _stop_reducing(self) -> None:
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.leave(self.rank)

    def _reduce(self, group: Group) -> None:
        piece, round_ = self._piece, self.rounds.round
        assert piece is not None and round_ is not None
        piece.grouped_at = self.clock.now if piece.grouped_at is None else piece.grouped_at
        reduction = self._reduction = self.swarm.reduction(group)
        reduction.begin(
            self.rank,
            on_reduced=lambda reduced: self._reduced(group, reduced),
            on_failed=lambda suspects: self._reduce_failed(group, suspects),
            stall_s=round_.timing.stall_s,
            connect_s=round_.timing.connect_s,
        )
        limit_s = ATTEMPT_SHARE * round_.timing.attempt_s
        self._later(limit_s, lambda: self._time_out(reduction, limit_s))

    def _time_out(self, reduction: Reduction, seconds: float) -> None:
        if self._reduction is reduction:
            self._deadlines.attempt_timed_out(seconds)
            if self.rounds.round is not None:
                self.rounds.round.timing = self._timing()
            reduction.time_out()

    def _reduced(self, group: Group, reduced: Reduced) -> None:
        piece, round_ = self._piece, self.rounds.round
        if not self._is_reducing(group) or piece is None or round_ is None:
            return
        self._reduction = None
        machine, parts = self.plan.machine, piece.parts
        parts.connect_s, parts.reduce_s = reduced.connect_s, reduced.reduce_s
        piece.sent_bytes += reduced.volume.sent_bytes
        link = self.plan.link
        if reduced.reduce_s >= WINDOW_S:
            self._bandwidth.saw(min(link.up_bytes_per_s, link.down_bytes_per_s))
        preview_s = machine.hop_s + machine.left_to_preview_s(
            self._bytes, reduced.reduce_s, FP32_BYTES * STATE_CHUNK_NUMEL
        )
        parts.preview_s = preview_s

        def vote() -> None:
            piece.attempt, piece.voted_at = group.attempt, self.clock.now
            digest = self.swarm.names.of(group.lineage, group.attempt)
            shares = self.swarm.share_digests(len(group.members))
            vote = Vote(group.fragment, group.lineage, group.attempt, shares, digest, digest)
            self.rounds.post(lambda now: round_.on_reduced(group.attempt, vote, now))

        self._later(preview_s, vote)

    def _reduce_failed(self, group: Group, suspects: frozenset[int]) -> None:
        round_ = self.rounds.round
        if self._is_reducing(group) and round_ is not None:
            self._reduction = None
            self.rounds.post(lambda now: round_.on_reduce_failed(group.attempt, suspects, now))

    def _is_reducing(self, group: Group) -> bool:
        return self.is_running and self._reduction is not None and self._reduction.group == group

    def _apply(self, commit: Commit) -> None:
        """Other events wait until it is done."""
        piece = self._piece
        assert piece is not None and piece.attempt == commit.group.attempt, "a commit without its result"
        piece.parts.vote_s = self.clock.now - piece.voted_at
        piece.parts.apply_s = self._seconds(self.plan.machine.apply) + self.plan.machine.hop_s
        self.rounds.is_busy = True
        self._later(piece.parts.apply_s, lambda: self._applied(commit, piece))

    def _applied(self, commit: Commit, piece: Piece) -> None:
        assert self.state is not None and self.rounds.round is not None and piece.grouped_at is not None
        group, now = commit.group, self.clock.now
        self._is_riding = False
        tokens = self.state.tokens + group.tokens // self.swarm.scenario.schedule.num_fragments
        lineage = self.swarm.names.of(self.state.lineage, commit.anchor)
        self.state = State(self.state.epoch + 1, lineage, tokens, self.state.lineage)
        self.rounds.commits.add(commit)
        self.post_standing("training", cause=group.attempt)
        piece.parts.round_s, piece.parts.wait_s = now - piece.grouped_at, piece.grouped_at - piece.since
        steps = self.swarm.scenario.schedule.steps_per_epoch
        is_early = is_carried(piece.proposal, group.epoch * steps)
        self._deadlines.epoch_took(
            now - self._epoch_began_at,
            of_it_round_s=piece.parts.round_s,
            trained_s=0.0 if is_early else piece.since - self._epoch_began_at,
            steps_s=steps * self.plan.step_s,
        )
        if (gathered := self.rounds.round.gathered) is not None:
            self._deadlines.gathered(gathered.seconds, complete=not gathered.missing)
        self._ended = EpochOfPeer(
            epoch=self.state.epoch,
            rank=self.rank,
            at=now,
            num_members=len(group.members),
            train_s=piece.work.seconds,
            steps=piece.work.steps,
            sent_bytes=piece.sent_bytes,
            attempt=group.attempt,
            lineage=lineage,
            parts=piece.parts,
        )
        self.swarm.committed(self.state, group, self._ended)
        self._answer(counts=True, local_step=0)
        self._open_round()
        self.rounds.is_busy = False
        self.rounds.drain()

    def _answer(self, *, counts: bool, local_step: int) -> None:
        assert self.state is not None
        self._piece, answer = None, Answer(self.state.epoch, local_step, counts)
        self._later(self.plan.machine.hop_s, lambda: self.worker.answer(answer))

    # Catching up

    def _catch_up(self, action: CatchUp) -> None:
        """Fetch the better state, then bring the work to the round on it, or let it ride along."""
        assert self.state is not None
        self.rounds.is_busy = True
        view = self._view()
        target = membership.ahead_of(view, self.rank) or view.get(action.rank)
        if target is None or target.lineage == self.state.lineage:
            self._caught_up(action, None)
            return
        newer = State(target.epoch, target.lineage, target.committed_tokens)

        def fetched(has_come: bool) -> None:
            if has_come:
                self._caught_up(action, newer)
            else:
                self._catch_up(action)

        self.swarm.fetch(self, self.state, newer, fetched)

    def _caught_up(self, action: CatchUp, newer: State | None) -> None:
        self.rounds.is_busy = False
        piece = self._piece
        if newer is not None:
            self.state = newer
            self.rounds.commits.clear()
            self.swarm.losses.caught_up += 1
            returns = piece is not None and not action.contributed
            is_its_turn = piece is not None and self._fragment_of(newer.epoch) == piece.fragment
            may_ride = returns and is_its_turn and not self._is_riding
            entry = self.swarm.entry_with_work(self) if may_ride else None
            self._is_riding = entry is not None
            waits = returns and is_its_turn and entry is None
            self.post_standing("averaging" if waits else "training")
            if piece is not None and not waits:
                entry = self.swarm.progress_of_others(self) if entry is None else entry
                self._answer(counts=action.contributed, local_step=entry)
        self._open_round()
        if self._piece is not None:
            self._propose()
        self.rounds.drain()

    # Figures

    def _fragment_of(self, epoch: int) -> int:
        return self.swarm.scenario.schedule.fragment_of(epoch)

    @property
    def _bytes(self) -> float:
        """Of the fragment that is being averaged, fp32."""
        assert self._piece is not None
        return FP32_BYTES * self.swarm.scenario.fragment_sizes[self._piece.fragment]

    def _seconds(self, pace: float) -> float:
        return self._bytes / pace

    def _later(self, seconds: float, event: Callable[[], object]) -> None:
        self.clock.after(seconds, lambda: event() if self.is_running else None)
