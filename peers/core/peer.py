"""The peer: every decision of one member of the swarm, as a pure state machine.

`handle(event, now)` takes an event and returns effects; `deadline` says when to call it again if no event comes.
Runtimes carry effects out and report their outcomes as events; they decide nothing.

After each event, rules are applied in a fixed order (`_apply_one_rule`) until none of them applies any more: detect
silent peers, found the run, commit, catch up, answer the worker, advance the round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from peers.core import events
from peers.core.catch_up import CatchUp
from peers.core.chain import MAX_OWN, Chain
from peers.core.effects import (
    Adopt,
    Answer,
    Apply,
    Broadcast,
    CancelReduce,
    Effect,
    Pledge,
    Send,
    Tell,
)
from peers.core.events import Event
from peers.core.founding import NO_HEAD, Founding, is_offer_sound
from peers.core.group import RoundContext
from peers.core.health import Swarm
from peers.core.late_work import LateWork
from peers.core.plans import Entry, claim_of, is_quorum
from peers.core.round import Round, Stage
from peers.core.settings import Settings
from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.core.worker import Worker
from peers.protocol.certificates import Certificate, Keys, Plan, Verify
from peers.protocol.limits import MAX_EPOCH
from peers.protocol.messages import (
    Abort,
    Ask,
    Certificates,
    Decline,
    Found,
    Message,
    Offer,
    Phase,
    Propose,
    Status,
    Vote,
)
from peers.timing import OFTEN_S

MAX_PLEDGES = 2 * MAX_OWN
"""Pledges that are remembered: enough for every head that this peer may roll back to."""
_MAX_RULES = 10_000
"""Rules applied after one event: more is a bug."""


class Peer:
    """`world_rank`: -1 if none was given. `pledges`: by head, the last attempt that this peer signed before it
    restarted (effect Pledge)."""

    def __init__(
        self,
        *,
        keys: Keys,
        verify: Verify,
        settings: Settings,
        incarnation: int,
        world_rank: int,
        pledges: Mapping[str, int],
        now: float,
    ) -> None:
        self.me, self._keys, self._verify, self._settings = keys.peer_id, keys, verify, settings
        self._incarnation, self.world_rank = incarnation, world_rank
        self._pledges = dict(pledges)
        self.timing = Timing.of(settings)
        self.swarm = Swarm(self.timing)
        self.chain = Chain()
        # Incarnations are nanoseconds, so the next one is larger than any number of moves from this one on.
        self.worker = Worker(moves=incarnation)
        self.round: Round | None = None
        self.catch_up = CatchUp(self.me, settings, self.chain, self.swarm, self.timing)
        self._late_work = LateWork(self.worker, self.chain, self.swarm, self.catch_up, settings, self.timing)
        self._round_context = RoundContext(
            keys=keys,
            verify=verify,
            settings=settings,
            timing=self.timing,
            swarm=self.swarm,
            chain=self.chain,
        )
        self._founding = Founding(
            keys=keys,
            verify=verify,
            settings=settings,
            timing=self.timing,
            swarm=self.swarm,
            began_at=now,
            signed=self._pledges.get(NO_HEAD, -1),
        )
        self._offer: Offer | None = None
        self._is_leaving = self._is_log_needed = False
        self.last_failures: tuple[str, ...] = ()
        """Why attempts failed before the last commit."""
        self._ranks: dict[str, int] = {}
        self._head_since = now
        self._last_handled = now
        self._sequence = 0
        self._last_status: Status | None = None
        self._status_sent_at = -math.inf
        self._genesis_heard_at = now
        self.deadline = now

    # Read by runtimes and monitoring

    @property
    def head(self) -> str:
        return self.chain.head

    @property
    def certificate(self) -> Certificate | None:
        return self.chain.newest if self.chain.head else None

    @property
    def epoch(self) -> int:
        return self.chain.epoch

    @property
    def phase(self) -> Phase:
        if self._is_leaving:
            return "leaving"
        if self.catch_up.target is not None:
            return "fetching"
        states: dict[str, Phase] = {
            "none": "waiting",
            "waits": "waiting",
            "trains": "training",
            "ready": "ready",
            "finished": "leaving",
        }
        return states[self.worker.state] if self.head else "waiting"

    @property
    def epoch_s(self) -> float:
        """How long the worker's epoch may last, by the speeds known so far; 0: as long as its steps take."""
        return self._late_work.epoch_s()

    @property
    def hears_a_run(self) -> bool:
        """Whether peers announce a run that exists: this peer holds a certificate."""
        return self.chain.knows_a_run() and self.swarm.hears_a_head()

    def rank_of(self, peer_id: str) -> int | None:
        """The world rank of a member of the roster."""
        return self._ranks.get(peer_id)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """World ranks of the peers that the next commit waits for."""
        if self.round is None:
            return ()
        missing = self.round.missing(self._entry, self._last_handled, is_training=self.worker.is_training)
        return tuple(sorted(rank for peer_id in missing if (rank := self.rank_of(peer_id)) is not None))

    @property
    def num_lacking(self) -> int:
        """How many more peers have to join before any commit is possible: robust rules need a group of several."""
        return max(0, self._settings.aggregation.least_group - 1 - len(self.swarm.live()))

    # Events

    def handle(self, event: Event | None, now: float) -> list[Effect]:
        """`event` None: the deadline has passed."""
        turn = Turn(now)
        self._notice_own_freeze(now)
        if now < self.deadline and self._is_routine(event, now):
            return []
        if event is not None:
            self._dispatch(turn, event)
        for _ in range(_MAX_RULES):
            turn.look_again()
            if not self._apply_one_rule(turn):
                break
        else:
            raise AssertionError("the rules of a peer do not terminate")
        self._broadcast_status(turn)
        self.deadline = turn.deadline
        self._remember_pledges(turn.effects)
        return turn.effects

    def _remember_pledges(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Pledge):
                self._pledges.pop(effect.head, None)
                self._pledges[effect.head] = effect.attempt
                if len(self._pledges) > MAX_PLEDGES:
                    del self._pledges[next(iter(self._pledges))]

    def _is_routine(self, event: Event | None, now: float) -> bool:
        """Record an event on which no decision depends at once (a heartbeat, a worker's progress) and return True; else
        False. The deadline is kept: progress as announced before only makes it fire too early."""
        match event:
            case events.Received(peer_id, Status() as status):
                return peer_id != self.me and self.swarm.heard_again(peer_id, status, now)
            case events.StatusesReceived(statuses):
                # Visits every status, so that each heartbeat is recorded even if another status is news.
                news = [
                    (peer_id, status)
                    for peer_id, status in statuses
                    if peer_id != self.me and not self.swarm.heard_again(peer_id, status, now)
                ]
                return not news
            case events.StillHere(peer_ids):
                self.swarm.still_here(peer_ids, now)
                return True
            case events.WorkerTrains(local_step, step_s):
                self.worker.tell(local_step, step_s, now)
                return True
        return False

    def _notice_own_freeze(self, now: float) -> None:
        late_s = now - max(self.deadline, self._last_handled)
        self._last_handled = now
        if late_s > min(self.timing.reaction_s, self.timing.silence_s / 2):
            self.swarm.excuse_own_freeze(late_s)
            if self.round is not None:
                self.round.excuse_own_freeze(late_s)

    def _dispatch(self, turn: Turn, event: Event) -> None:
        round_, worker = self.round, self.worker
        match event:
            case events.Received(peer_id, message):
                self._receive(turn, peer_id, message)
            case events.StatusesReceived(statuses):
                for peer_id, status in statuses:
                    self._receive(turn, peer_id, status)
            case events.StillHere(peer_ids):
                self.swarm.still_here(peer_ids, turn.now)
            case events.Connected(peer_id):
                self.swarm.connected(peer_id, turn.now)
                if self._last_status is not None:
                    # Do not wait for the next heartbeat: the other peer may be about to found a run of its own.
                    turn.do(Send(peer_id, replace(self._last_status, sequence=self._sequence)))
            case events.Disconnected(peer_id):
                self.swarm.disconnected(peer_id, turn.now)
            case events.RoundTrip(peer_id, seconds):
                self.swarm.measured(peer_id, seconds)
            case events.StateOffered(offer):
                self._offer = offer
            case events.WorkerWaits():
                worker.arrive()
            case events.WorkerTrains(local_step, step_s):
                worker.tell(local_step, step_s, turn.now)
            case events.WorkReady(work):
                worker.hand_over(work, self._settings.fragment_of(worker.epoch), turn.now)
            case events.WorkerGone():
                worker.end()
            case events.Reduced(plan, anchor, momentum):
                if round_ is not None and not self._is_leaving:
                    round_.on_reduced(turn, plan, anchor, momentum)
                    if round_.voted_result is not None:
                        worker.voted_heads.add(round_.voted_result.head)
            case events.ReduceFailed():
                if round_ is not None:
                    round_.on_reduce_failed(turn, event)
            case events.Fetched(head):
                self._fetched(turn, head)
            case events.FetchFailed(head, _, suspects):
                if self.catch_up.target is not None and self.catch_up.target.head == head:
                    self.catch_up.on_failed(turn, suspects)
            case events.LogNeeded(is_needed):
                self._is_log_needed = is_needed
            case events.Leave():
                self._is_leaving = True

    def _receive(self, turn: Turn, peer_id: str, message: Message) -> None:
        if peer_id == self.me:
            return
        if isinstance(message, Status):
            self._receive_status(turn, peer_id, message)
            return
        self.swarm.heard(peer_id, None, turn.now)
        round_ = self.round
        match message:
            case Certificates():
                self._take_certificates(peer_id, message)
            case Ask():
                self.catch_up.on_ask(turn, peer_id, message)
            case Found() if (genesis := self.chain.genesis_of(peer_id)) is not None:
                # The sender is a founder that restarted, and does not know that its run exists.
                turn.do(Send(peer_id, Certificates(head=genesis.head, certificates=(genesis,))))
            case Found(body) if not self.head:
                self._founding.on_found(peer_id, body)
            case Vote() if not self.head:
                self._founding.on_vote(peer_id, message)
            case Propose(plan) if round_ is not None:
                round_.on_propose(turn, peer_id, plan)
            case Vote() if round_ is not None and message.head == self.head:
                round_.on_vote(turn, peer_id, message)
            case Decline() if round_ is not None and message.head == self.head:
                round_.on_decline(turn, peer_id, message)
            case Abort() if round_ is not None and message.head == self.head:
                round_.on_abort(turn, peer_id, message)

    def _receive_status(self, turn: Turn, peer_id: str, status: Status) -> None:
        offer = status.offer
        if offer is not None and offer.certificate is not None and not self.head:
            check = partial(is_offer_sound, verify=self._verify)
            if not self.swarm.is_sound(peer_id, offer, check, turn.now):
                status = replace(status, offer=None)
        self.swarm.heard(peer_id, status, turn.now)
        if status.head:
            self._founding.heard_of_a_run(turn.now)

    def _take_certificates(self, sender: str, message: Certificates) -> None:
        """Add certificates that were asked for or that concern this peer; stop at any other or invalid one."""
        if not message.certificates:
            self.catch_up.on_unknown(sender, message.head)
        elif not message.is_path:
            self.swarm.strike(sender, self.epoch)
            return
        is_wanted = self.catch_up.has_asked(sender, message.head)
        for certificate in message.certificates:
            if self.chain.get(certificate.head) is not None:
                continue
            if not (is_wanted or self._concerns_me(certificate.plan)):
                return
            plan = certificate.plan
            if plan.manifest != self._settings.manifest or (
                certificate.is_genesis and plan.epoch > MAX_EPOCH
            ):
                return
            # Verify roster members first, so that a forged certificate with many unknown signers fails cheaply.
            if not certificate.is_signed(self._verify, first=self._ranks.keys()):
                self.swarm.strike(sender, self.epoch)
                return
            self.chain.add(certificate)

    def _concerns_me(self, plan: Plan) -> bool:
        """Whether this peer is among the signers, or the plan follows its head and names a majority of that roster."""
        if self.me in plan.signer_set:
            return True
        return (
            bool(self.head) and plan.parent == self.head and is_quorum(plan.signers, self.chain.newest, 0.5)
        )

    # Rules

    def _apply_one_rule(self, turn: Turn) -> bool:
        """Apply the first rule that applies. False: none does."""
        self.swarm.notice_silence(turn)
        if self.phase == "leaving":
            return False
        return (
            self._claim_rank(turn)
            or self._found_run(turn)
            or self._commit(turn)
            or self.catch_up.advance(
                turn,
                can_fetch=self._can_fetch,
                has_worker=self.worker.state in ("trains", "ready"),
                voting_on=self.round.voting_on if self.round else -1,
            )
            or self._recheck_own_state(turn)
            or self._late_work.answer_late(turn, self.round)
            or self._late_work.go_ahead(turn, self.round)
            or self._begin_worker(turn)
            or self._advance_round(turn)
        )

    @property
    def _can_fetch(self) -> bool:
        """A newcomer needs its worker's offer first, which says how large the state is."""
        return bool(self.head) or self._offer is not None

    def _claim_rank(self, turn: Turn) -> bool:
        """If this peer was given no world rank, take the one that the roster has for it, else claim a free one.

        Its worker needs a rank before any certificate can assign one: data blocks are assigned by rank.
        """
        if self.world_rank >= 0 or self.head:
            return False
        newest = self.catch_up.newest_of_largest_run(turn)
        if newest is None and not turn.passed(self._founding.not_before):
            return False
        roster = {member.peer_id: member.world_rank for member in newest.plan.roster} if newest else {}
        # A rank is claimed only after one silence timeout: by then every live peer has been heard.
        if self.me not in roster and not turn.passed(self._founding.began_at + self.timing.silence_s):
            return False
        self.world_rank = roster.get(self.me, claim_of(self.me, roster, self.swarm.live()))
        return True

    def _found_run(self, turn: Turn) -> bool:
        if self.head or self._offer is None:
            return False
        if (genesis := self._founding.certificate) is not None:
            self._founding.certificate = None
            self.chain.add(genesis)
            turn.do(Broadcast(Certificates(head=genesis.head, certificates=(genesis,))))
            return self._begin_from(turn, genesis)
        if (genesis := self.chain.genesis_of(self.me)) is not None:
            if self._begin_as_founder(turn, genesis):
                return True
            if not self._forget_unreachable(turn, genesis):
                return False
        if (
            self.hears_a_run
            or (self.swarm.has_unheard() and not turn.passed(self._founding.heard_by))
            or not turn.passed(self._founding.not_before)
        ):
            return False
        return self._founding.advance(turn, self.world_rank, self._offer)

    def _begin_as_founder(self, turn: Turn, genesis: Certificate) -> bool:
        """Begin from a genesis that this peer has signed. True if it did.

        If the run has commits beyond this genesis, join as a newcomer instead (catch_up.py).
        """
        has_commits = self.chain.knows_commits() or not self._certified_heads <= {genesis.head}
        return not has_commits and self.catch_up.target is None and self._begin_from(turn, genesis)

    def _forget_unreachable(self, turn: Turn, genesis: Certificate) -> bool:
        """Forget this genesis if no live peer announces any head for long: nobody can provide its state. True if so."""
        if any(self.swarm.heads):
            self._genesis_heard_at = turn.now
        if not turn.passed(self._genesis_heard_at + self.timing.last_resort_s):
            return False
        self.chain.forget(genesis.head)
        return True

    @property
    def _certified_heads(self) -> set[str]:
        """Heads that live peers announce and whose certificates this peer holds."""
        return {head for head in self.swarm.heads if head and self.chain.get(head)}

    def _begin_from(self, turn: Turn, genesis: Certificate) -> bool:
        """Adopt the genesis if its state is the one that this peer offered; otherwise it is fetched (catch_up.py)."""
        offer = self._offer
        assert offer is not None
        if (offer.anchor, offer.momentum) != (genesis.body.anchor, genesis.body.momentum):
            return False
        self._adopt(turn, (genesis,))
        if offer.certificate is not None:
            self.chain.met(offer.certificate.plan.roster_set)
        return True

    def _commit(self, turn: Turn) -> bool:
        round_ = self.round
        if round_ is None or self.catch_up.is_checking:
            return False
        return self._publish_certificate(turn, round_) or self._apply_commit(turn, round_)

    def _publish_certificate(self, turn: Turn, round_: Round) -> bool:
        """Broadcast the certificate of an attempt that this peer led, once it is complete."""
        if (certificate := round_.certificate) is None:
            return False
        round_.certificate = None
        self.chain.add(certificate)
        turn.do(Broadcast(Certificates(head=certificate.head, certificates=(certificate,))))
        return True

    def _apply_commit(self, turn: Turn, round_: Round) -> bool:
        """Apply the result that this peer voted for, once its certificate is known."""
        if round_.voted_result is None or (certificate := self.chain.get(round_.voted_result.head)) is None:
            return False
        if self.catch_up.target_outweighs(certificate):
            return False
        # Do not wait for a fetch that donors may hold back: this commit can be applied now.
        self.catch_up.end()
        turn.do(Apply(certificate))
        self._learn_from(turn, round_)
        self._move_to(turn, (certificate,))
        step = self._late_work.head_start(turn, certificate)
        self._answer_contributor(turn, certificate, step, held_s=round_.held_s)
        return True

    def _learn_from(self, turn: Turn, round_: Round) -> None:
        """Update the timeouts by how long this round and epoch took."""
        if round_.gathered is not None:
            waited_s, last_s, is_complete = round_.gathered
            self.timing.gathered(waited_s, last_s, complete=is_complete)
        if round_.held_s > OFTEN_S:
            text = f"this commit has waited {round_.held_s:.0f} s for a peer that downloads the state"
            turn.do(Tell("held", text))
        epoch_s = turn.now - self._head_since - round_.held_s
        self.timing.committed(round_s=round_.reduced_s, epoch_s=epoch_s)

    def _answer_contributor(
        self, turn: Turn, certificate: Certificate, local_step: int = 0, *, held_s: float = 0.0
    ) -> None:
        """Tell the worker that this commit contains its work, and let it train on from the current head. `held_s`: for
        how long the commit waited for peers that downloaded the state."""
        plan, worker = certificate.plan, self.worker
        is_last = worker.work is not None and worker.work.last
        self.timing.answered(turn.now - worker.ready_at - held_s)
        worker.was_committed(plan.fragment, plan.epoch)
        worker.base = self.head
        worker.resume(self.epoch, local_step, is_finished=is_last)
        turn.do(Answer("contributed", self.chain.newest, local_step, self._late_work.epoch_s()))

    def _recheck_own_state(self, turn: Turn) -> bool:
        """Fetch the state of this peer's own head from others if this peer's digests differed from the majority's."""
        round_ = self.round
        if round_ is None or self.catch_up.target is not None or not round_.lost_its_state():
            return False
        if not self.swarm.live_at(self.head):
            return False
        self.catch_up.fetch(turn, (round_.parent,))
        return True

    def _fetched(self, turn: Turn, head: str) -> None:
        target, path = self.catch_up.target, self.catch_up.path
        if target is None or target.head != head:
            return
        self.catch_up.end()
        if head == self.head:
            turn.do(Adopt(target))
            return
        self._adopt(turn, path)

    def _adopt(self, turn: Turn, path: tuple[Certificate, ...]) -> None:
        """Adopt the state at the end of `path`, which was fetched or offered, and settle what happens to the work in
        hand."""
        worker, old = self.worker, self.head
        turn.do(Adopt(path[-1]))
        fork = self.chain.fork_to(path[-1].head) if old else None
        if fork is not None and fork.ours:
            lost = sum(self.me in certificate.plan.signers for certificate in fork.ours)
            turn.do(
                Tell("fork", f"gave up {len(fork.ours)} commits of this side of a fork", {"commits": lost})
            )
            worker.roll_back_to(fork.ancestor.plan.epoch)
        self._move_to(turn, path)
        # Clamp `based_on` to the adopted epoch, also without a known common ancestor: plans with work based on a later
        # epoch are declined.
        worker.roll_back_to(self.epoch)
        if worker.work is None:
            return
        own_commit = self._late_work.own_commit_in(path)
        if own_commit is not None:
            self._answer_contributor(turn, own_commit, self._late_work.entry_step(turn))

    def _begin_worker(self, turn: Turn) -> bool:
        if self.worker.state != "waits" or not self.head or self.catch_up.target is not None:
            return False
        step = self._late_work.entry_step(turn)
        self.worker.begin(self.head, self.epoch, step)
        turn.do(Answer("begin", self.chain.newest, step, self._late_work.epoch_s()))
        return True

    def _advance_round(self, turn: Turn) -> bool:
        round_, worker = self.round, self.worker
        if round_ is None or self.catch_up.target is not None:
            return False
        is_last = worker.has_lost_work or (worker.work is not None and worker.work.last)
        may_be_held = self._is_log_needed and not is_last
        return round_.advance(turn, self._entry, worker.progress, may_be_held=may_be_held)

    @property
    def _entry(self) -> Entry | None:
        """This peer's work, if it may be in the next commit."""
        worker = self.worker
        is_here = worker.work is not None and worker.base == self.head
        return Entry(self.world_rank, worker.work) if is_here and worker.work is not None else None

    def _move_to(self, turn: Turn, path: tuple[Certificate, ...]) -> None:
        """Move to the end of `path`: epoch, head, round and chain change together, here and nowhere else."""
        if self.round is not None:
            self.last_failures = tuple(self.round.failures)
            if self.round.stage is Stage.REDUCE:
                turn.do(CancelReduce())
        is_first = not self.chain.head
        self.chain.move_to(path)
        parent = self.chain.newest
        roster = self._ranks = {member.peer_id: member.world_rank for member in parent.plan.roster}
        self._take_rank(turn, parent.plan)
        self.swarm.roster = frozenset(roster)
        for peer_id in sorted(roster.keys() - {self.me}):
            self.swarm.expect(peer_id, turn.now)
        signers = {peer_id for certificate in path for peer_id in certificate.plan.signers}
        self.swarm.head_moved(turn.now, parent.head, self.epoch, signers, is_first=is_first)
        self.catch_up.head_moved()
        self.worker.head_moved()
        self._head_since = turn.now
        self.round = Round(
            self._round_context,
            parent,
            now=turn.now,
            signed=self._pledges.get(parent.head, -1),
            absent={peer_id: self.chain.num_absent(peer_id) for peer_id in roster},
            recent=self.chain.recent_heads(2),
        )

    def _take_rank(self, turn: Turn, plan: Plan) -> None:
        """Take the world rank that the plan assigns; if it assigns none, and this peer has none or a member's, claim a
        free one."""
        # Contributors first: a peer is not on the roster any more after its last commit.
        given = {c.peer_id: c.world_rank for c in plan.contributors}.get(self.me, self._ranks.get(self.me))
        if given is None and self.world_rank in (-1, *self._ranks.values()):
            given = claim_of(self.me, self._ranks, self.swarm.live())
        if given is None or given == self.world_rank:
            return
        if self.world_rank >= 0:
            text = f"world rank {self.world_rank} is another peer's: this one has {given} from now on"
            turn.do(Tell("world_rank", text))
        self.world_rank = given

    # Status

    def _broadcast_status(self, turn: Turn) -> None:
        status, said = self._status(), self._last_status
        # A status that differs in the worker's progress alone waits for the next heartbeat.
        is_news = said is None or status != replace(said, local_step=status.local_step, step_s=status.step_s)
        if not is_news and not turn.passed(self._status_sent_at + self.timing.status_s):
            return
        self._sequence += 1
        self._last_status, self._status_sent_at = status, turn.now
        turn.passed(turn.now + self.timing.status_s)
        turn.do(Broadcast(replace(status, sequence=self._sequence)))

    def _status(self) -> Status:
        worker, phase = self.worker, self.phase
        is_ready = phase == "ready" and worker.base == self.head
        return Status(
            incarnation=self._incarnation,
            sequence=0,
            world_rank=self.world_rank,
            phase=phase,
            head=self.head,
            epoch=self.epoch,
            attempt=self.round.attempt if self.round else self._founding.attempt,
            work=worker.work if is_ready else None,
            offer=self._offer if not self.head else None,
            local_step=worker.local_step,
            step_s=worker.step_s,
        )
