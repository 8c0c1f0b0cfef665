"""The round on one head: a state machine that makes attempts at the next commit until one succeeds.

    gather -> reduce -> vote -> certificate | next attempt

Leader rule (`leader_of`): roster members lead one attempt each, in the order of hash(head, peer id). A member that is
not live, or not on this head, is skipped. So no peer can choose to lead, and a bad leader costs one attempt. If the
whole roster is gone, the peers that are ready on this head lead instead.

Group rule (group.py, `_gather`): the leader proposes a group once every peer that trains on this head is ready, or once
a quorum of the roster is ready and the grace has passed. Every peer evaluates this from the statuses that it receives,
so it knows when the leader should have proposed, and times it out if it does not.

What the leader does is in leading.py; who is blamed for a failed attempt, in blame.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from peers.core.blame import Blame
from peers.core.effects import CancelReduce, Pledge, Reduce, Send
from peers.core.events import ReduceFailed
from peers.core.group import Group, RoundContext
from peers.core.leading import Failure, Lead
from peers.core.plans import Entry, data_base_after
from peers.core.turn import Turn
from peers.core.worker import Progress
from peers.protocol.certificates import Body, Certificate, Plan
from peers.protocol.limits import MAX_ATTEMPT
from peers.protocol.messages import Abort, Decline, Vote

MAX_FAILURES = 64
"""Failures remembered per head: they are reported to people, and their number sets the pause between attempts."""
REDUCE_SHARE = 0.75
"""The reduction's timeout as a share of the attempt's: a member must report its failure before the leader times out."""


class Stage(Enum):
    GATHER = "gather"
    REDUCE = "reduce"
    VOTE = "vote"


class Gathering(NamedTuple):
    """How the last group was formed."""

    waited_s: float
    """From quorum to proposal."""
    last_s: float
    """From quorum until its last member was ready."""
    is_complete: bool
    """No member that is relied on (`Group.relies_on`) was excluded."""


class Round:
    """`signed`: the last attempt on this head that this peer signed before it restarted; -1: none.

    `absent`: for each roster member, how many commits in a row it has missed. `recent`: the heads just before this one.
    """

    def __init__(
        self,
        context: RoundContext,
        parent: Certificate,
        *,
        now: float,
        signed: int,
        absent: Mapping[str, int],
        recent: Collection[str],
    ) -> None:
        self._context, self.parent = context, parent
        self._swarm, self._timing = context.swarm, context.timing
        self._me = context.keys.peer_id
        self._began_at = now
        self._group = Group(context, parent, now=now, absent=absent, recent=recent)
        self._blame = Blame(context, parent)
        self.attempt, self._signed = min(MAX_ATTEMPT, signed + 1), signed
        self.stage = Stage.GATHER
        self.certificate: Certificate | None = None
        """Set when an attempt that this peer led has succeeded; the peer takes it from here."""
        self.voted_result: Body | None = None
        """What this peer last voted for; None once another reduction begins, which overwrites the result."""
        self.failures: list[str] = []
        self.gathered: Gathering | None = None
        self.reduced_s = 0.0
        """How long the last reduction took, without the vote: a single slow voter must not make rounds look long."""
        self._accepted_at = 0.0
        self._lead: Lead | None = None
        self._plan: Plan | None = None
        """The plan that this peer last took part in."""
        self._proposals: dict[int, Plan] = {}
        """Plans received for this attempt and later ones."""
        self._deadline = 0.0
        """When the attempt in which this peer takes part times out."""
        self._leader_failed = ""
        """Why this peer's reduction failed, if the leader seems to be the cause; empty: it has not failed."""
        self._not_before = 0.0
        """This peer proposes nothing before this time: the pause after a failure."""
        self._skipped_at = -math.inf
        """When this peer last skipped to the median attempt."""
        self._quorum_at: float | None = None
        """Since when enough peers have been ready; starts the grace."""
        self.held_s = 0.0
        """How long this peer, alone, has waited for peers that download its state (`_is_held`)."""
        self._held_at: float | None = None
        """When it last did so; None: it does not."""
        self._num_ready, self._last_ready_at = 0, now
        """How many are ready, and when the last of them became so."""
        self._leader_could_propose_at: float | None = None
        """The earliest time at which the current leader could have proposed; starts its timeout."""
        self._order = self._ordered(self._group.roster)

    @property
    def head(self) -> str:
        return self.parent.head

    def lost_its_state(self) -> bool:
        """Whether this peer's digests differed from the majority's since this was asked last: its state may be
        damaged."""
        was_outlier, self._blame.is_outlier = self._blame.is_outlier, False
        return was_outlier

    @property
    def voting_on(self) -> int:
        """The last attempt that this peer has signed, as long as its leader may have made the commit: the leader is not
        gone, and its last status shows neither a later attempt nor an unrelated head. -1: none."""
        if self.stage is Stage.VOTE:
            return self.attempt
        if self.voted_result is None or (leader := self.leader_of(self._signed)) == self._me:
            return -1
        status = self._swarm.status(leader)
        if status is None or self._swarm.is_gone(leader):
            return -1
        is_there = status.head == self.head and status.attempt <= self._signed
        return self._signed if is_there or status.head == self.voted_result.head else -1

    def _ordered(self, leaders: Collection[str]) -> Sequence[str]:
        return sorted(leaders, key=lambda peer_id: hashlib.sha256(f"{self.head} {peer_id}".encode()).digest())

    def leader_of(self, attempt: int) -> str:
        return self._order[attempt % len(self._order)]

    def advance(
        self, turn: Turn, entry: Entry | None, progress: Progress | None, *, may_be_held: bool
    ) -> bool:
        """Do what is due; True if anything was. `entry`: this peer's work; `progress`: its worker's, if it trains;
        `may_be_held`: whether this peer, if it is alone, waits for peers that download its state."""
        if self._skip_to_median_attempt(turn):
            return True
        if self._lead is not None and (failure := self._lead.watch(turn)) is not None:
            self._fail(turn, failure)
            return True
        if self.stage is not Stage.GATHER:
            return self._watch_attempt(turn)
        if self._lead is not None:
            return False
        if (plan := self._proposals.pop(self.attempt, None)) is not None:
            self._consider(turn, plan, entry)
            return True
        return self._gather(turn, entry, progress, may_be_held)

    @property
    def next_data_base(self) -> int:
        """The first sample of the next epoch, if no further peer joins before."""
        return data_base_after(self.parent.plan, self._group.data_width({}), self._context.settings)

    def missing(self, entry: Entry | None, now: float, *, is_training: bool) -> set[str]:
        """The peers that the next commit waits for."""
        ready, expected = self._ready_and_expected(Turn(now), entry, is_training=is_training)
        return expected - ready

    # Gathering

    def _gather(self, turn: Turn, entry: Entry | None, progress: Progress | None, may_be_held: bool) -> bool:
        ready, expected = self._ready_and_expected(turn, entry, is_training=progress is not None)
        is_enough = self._group.is_enough(turn, ready)
        if self._is_held(turn, ready, may_be_held and is_enough) or not is_enough:
            self._quorum_at, self._leader_could_propose_at, self._num_ready = None, None, 0
            return False
        self._quorum_at = turn.now if self._quorum_at is None else self._quorum_at
        if len(ready) > self._num_ready:
            self._num_ready, self._last_ready_at = len(ready), turn.now
        late = expected - ready
        if late and not turn.passed(self._quorum_at + self._grace_s(late, progress)):
            self._leader_could_propose_at = None
            return False
        leader = self.leader_of(self.attempt)
        if leader == self._me:
            if self.attempt <= self._signed or not turn.passed(self._not_before):
                return False
            self._note_group(turn, late)
            self._begin_to_lead(turn, ready, entry)
            return True
        if not self._can_lead(leader):
            return self._skip_leader(ready)
        return self._time_out_leader(turn, leader, entry)

    def _is_held(self, turn: Turn, ready: Collection[str], may_be_held: bool) -> bool:
        """Whether this peer, alone, does not commit yet because others download its state. It waits no longer than a
        round with the slowest link takes.

        As long as it waits there is no quorum, so this is not counted as waiting for members; nor as part of the epoch
        (`held_s`). A round with others needs no such wait: it takes as long as its bytes.
        """
        if self._held_at is not None:
            self.held_s += turn.now - self._held_at
        is_alone = set(ready) == {self._me} and not self._swarm.live_at(self.head)
        left_s = self._timing.first_round_s - self.held_s
        is_held = may_be_held and is_alone and not turn.passed(turn.now + left_s)
        self._held_at = turn.now if is_held else None
        return is_held

    def _skip_leader(self, ready: Collection[str]) -> bool:
        """Go to the next attempt or, if nobody in the order can lead, to another order. True: evaluate again."""
        if any(peer_id == self._me or self._can_lead(peer_id) for peer_id in self._order):
            if self.attempt < MAX_ATTEMPT:
                self.attempt += 1
            return self.attempt < MAX_ATTEMPT
        # The whole roster is gone: the peers that are ready on its head lead instead.
        self._order = self._ordered(ready)
        return True

    def _time_out_leader(self, turn: Turn, leader: str, entry: Entry | None) -> bool:
        """Fail this attempt if its leader could have proposed and has not. True if it failed."""
        if entry is None or self._me not in self._order:
            # The leader may be waiting for this peer's work; and a newcomer does not see what members see.
            self._leader_could_propose_at = None
            return False
        if self._leader_could_propose_at is None:
            self._leader_could_propose_at = max(turn.now, self._not_before)
        if self.attempt > self._median_attempt():
            # Most members have yet to reach this attempt.
            return False
        # After a failure the leader pauses too, at most for the silence timeout (Timing.pause_s).
        pause_s = self._timing.silence_s if self.attempt > 0 else 0.0
        if not turn.passed(self._leader_could_propose_at + pause_s + self._timing.reaction_s):
            return False
        self._fail(turn, Failure(f"its leader {leader} is silent"))
        return True

    def _grace_s(self, late: set[str], own: Progress | None) -> float:
        """How long a ready quorum waits for these peers. `own`: the progress of this peer, which may be one of them."""
        assert self._quorum_at is not None
        epoch_s = self._quorum_at - self._began_at - self.held_s
        relied_on = set(filter(self._group.relies_on, late))
        if members := relied_on & self._group.roster:
            statuses = {p: status for p in members if (status := self._swarm.status(p)) is not None}
            progress = [
                Progress(status.local_step, status.step_s, self._swarm.told_at(p))
                for p, status in statuses.items()
                if status.head == self.head and status.phase == "training"
            ]
            progress += [own] if own is not None and self._me in members else []
            return self._timing.grace_s(
                epoch_s,
                is_fetching=any(status.phase == "fetching" for status in statuses.values()),
                due_in_s=self._due_in_s(progress),
            )
        return self._timing.newcomers_grace_s(epoch_s) if relied_on else self._timing.least_grace_s

    def _due_in_s(self, late: Sequence[Progress]) -> list[float]:
        """How long after the quorum these peers will be ready, by their own progress, if all train as many steps."""
        assert self._quorum_at is not None
        settings = self._context.settings
        if settings.epoch_s is not None:
            return []
        end, early = settings.steps_per_epoch, settings.steps_per_epoch - settings.overlap_steps
        # Just after a commit they still train the end of the epoch before; in the run's last epoch nothing overlaps.
        return [
            progress.done_at(early if 0 < progress.local_step < early else end) - self._quorum_at
            for progress in late
        ]

    def _note_group(self, turn: Turn, late: Collection[str]) -> None:
        """Record how long it took to form this group, which excludes the peers that are `late`."""
        assert self._quorum_at is not None
        # Newcomers are not counted: waiting for one in vain says nothing about how long members take.
        is_complete = not any(map(self._group.relies_on, self._group.roster.intersection(late)))
        self.gathered = Gathering(
            turn.now - self._quorum_at, self._last_ready_at - self._quorum_at, is_complete
        )

    def _ready_and_expected(
        self, turn: Turn, entry: Entry | None, *, is_training: bool
    ) -> tuple[set[str], set[str]]:
        return self._group.ready_and_expected(
            turn,
            entry,
            is_training=is_training,
            attempt=self.attempt,
            suspects=self._blame.suspects,
            last_suspects=self._blame.last_suspects,
        )

    def _can_lead(self, peer_id: str) -> bool:
        status = self._swarm.status(peer_id)
        return status is not None and status.head == self.head and self._swarm.is_live(peer_id)

    # Leading

    def _begin_to_lead(self, turn: Turn, ready: Collection[str], entry: Entry | None) -> None:
        plan = self._group.plan_of(self.attempt, ready, entry)
        self._lead = Lead(self._context, self._blame, plan, turn.now)
        self._lead.propose(turn, ready)
        if self._me in ready:
            self._accept(turn, plan)

    def on_vote(self, turn: Turn, sender: str, vote: Vote) -> None:
        if (lead := self._lead) is None:
            return
        if (failure := lead.on_vote(turn, sender, vote)) is not None:
            self._fail(turn, failure)
        elif lead.certificate is not None:
            self.certificate, self._lead = lead.certificate, None
            # A leader that did not contribute has no result to apply and must fetch the new state; until it has had
            # time for that, it proposes nothing more on this head.
            self._not_before = turn.now + self._timing.silence_s + self._timing.regain_s

    def on_decline(self, turn: Turn, sender: str, decline: Decline) -> None:
        if (
            self._lead is not None
            and (failure := self._lead.on_decline(turn, sender, decline, self._group)) is not None
        ):
            self._fail(turn, failure)

    # Taking part

    def on_propose(self, turn: Turn, sender: str, plan: Plan) -> None:
        if plan.parent != self.head or sender != self.leader_of(plan.attempt):
            return
        is_stale = plan.attempt < self.attempt or plan.attempt <= self._signed
        is_busy = plan.attempt == self.attempt and self.stage is not Stage.GATHER
        if is_busy and self._plan is not None and plan == self._plan:
            return
        if is_stale or is_busy:
            self._decline(turn, sender, plan.attempt, "it had given this attempt up already")
        elif plan.attempt < self.attempt + len(self._order):
            self._proposals[plan.attempt] = plan

    def _consider(self, turn: Turn, plan: Plan, entry: Entry | None) -> None:
        """Check a proposed plan: accept it and reduce, or decline it and fail the attempt."""
        leader = self.leader_of(plan.attempt)
        mine = next((c.work for c in plan.contributors if c.peer_id == self._me), None)
        if entry is None or mine != entry.work:
            self._decline(turn, leader, plan.attempt, "it is not ready with the work that the plan names")
            self._fail(turn, Failure("the plan names other work than this peer has ready"))
            return
        present = {contributor.peer_id for contributor in plan.contributors}
        others = self._group.roster - present
        if fault := self._group.fault_in(plan):
            if self._group.would_remove(self._group.removed_by(plan), present):
                self._blame.strike(turn, leader, f"it proposes {fault}")
        elif not self._group.is_quorum(present) and not self._group.can_do_without(turn, others):
            fault = f"a group of {len(present)}, which is no quorum, although others are live"
        if fault:
            self._decline(turn, leader, plan.attempt, fault)
            self._fail(turn, Failure(f"its leader {leader} proposes {fault}"))
            return
        if self._quorum_at is not None:
            _, expected = self._ready_and_expected(turn, entry, is_training=True)
            self._note_group(turn, expected - present)
        self._accept(turn, plan)

    def _accept(self, turn: Turn, plan: Plan) -> None:
        self._plan, self.stage, self.voted_result = plan, Stage.REDUCE, None
        self._deadline, self._accepted_at = turn.now + self._timing.attempt_s, turn.now
        turn.do(Reduce(plan, REDUCE_SHARE * self._timing.attempt_s))

    def on_reduced(self, turn: Turn, plan_digest: str, anchor: str, momentum: str) -> None:
        plan = self._plan
        if self.stage is not Stage.REDUCE or plan is None or plan.digest != plan_digest:
            return
        self.voted_result = Body(plan=plan, anchor=anchor, momentum=momentum)
        self.reduced_s = turn.now - self._accepted_at
        self.stage, self._signed = Stage.VOTE, plan.attempt
        self._deadline = turn.now + self._timing.vote_s
        turn.do(Pledge(self.head, plan.attempt))
        vote = Vote(
            head=self.head,
            attempt=plan.attempt,
            plan=plan_digest,
            anchor=anchor,
            momentum=momentum,
            signature=self._context.keys.sign(self.voted_result.signed_bytes),
        )
        leader = self.leader_of(plan.attempt)
        if leader == self._me:
            self.on_vote(turn, self._me, vote)
        else:
            turn.do(Send(leader, vote))

    def on_reduce_failed(self, turn: Turn, failed: ReduceFailed) -> None:
        plan = self._plan
        if self.stage is not Stage.REDUCE or plan is None or plan.digest != failed.plan:
            return
        leader = self.leader_of(plan.attempt)
        if failed.suspects == {leader} and not failed.offenders | failed.told_by and self._can_lead(leader):
            # The leader may have failed because of another member: then its Abort, which names that one, is on the way.
            self._decline(turn, leader, self.attempt, failed.reason, failed.suspects)
            self._leader_failed = failed.reason
            self._deadline = min(self._deadline, turn.now + self._timing.reaction_s)
            return
        suspects = self._blame.for_failed_reduction(turn, plan, failed)
        self._give_up(turn, Failure(failed.reason, suspects), failed.suspects, failed.told_by)

    def give_up(self, turn: Turn, reason: str) -> None:
        """Abandon the running reduction, if there is one."""
        if self.stage is Stage.REDUCE:
            self._give_up(turn, Failure(reason), frozenset(), frozenset())

    def _give_up(
        self, turn: Turn, failure: Failure, suspects: frozenset[str], told_by: frozenset[str]
    ) -> None:
        """Fail this attempt and tell the leader why; as the leader, abort it."""
        if self._lead is not None:
            self._lead.abort(turn, failure.reason, failure.suspects)
        else:
            self._decline(turn, self.leader_of(self.attempt), self.attempt, failure.reason, suspects, told_by)
        self._fail(turn, failure)

    def excuse_own_freeze(self, seconds: float) -> None:
        """This process was frozen for `seconds`: the votes that came meanwhile are not late."""
        self._deadline += seconds
        if self._lead is not None:
            self._lead.deadline += seconds

    def _watch_attempt(self, turn: Turn) -> bool:
        """Fail the attempt that this peer takes part in if its leader is lost or it timed out. True if so."""
        assert self._plan is not None
        leader = self.leader_of(self.attempt)
        if leader != self._me and not self._swarm.is_live(leader):
            self._fail(turn, Failure(f"lost its leader {leader}", (leader,)))
            return True
        if leader != self._me and turn.passed(self._deadline):
            if self._leader_failed:
                self._blame.strike(turn, leader, self._leader_failed, 0.5)
                self._fail(turn, Failure(self._leader_failed, (leader,)))
            else:
                self._fail(turn, Failure("it took too long"))
            return True
        return False

    def on_abort(self, turn: Turn, sender: str, abort: Abort) -> None:
        if abort.attempt != self.attempt or sender != self.leader_of(abort.attempt) or sender == self._me:
            return
        if self._plan is not None and self._plan.attempt == abort.attempt:
            self._blame.for_digests(turn, self._plan, abort.votes)
        self._blame.for_abort(turn, sender, abort, len(self._order))
        lost = set(abort.lost) - {self._me} or ({sender} if self._leader_failed else set())
        self._fail(turn, Failure(f"its leader gave it up: {abort.reason}", lost))

    # Between attempts

    def _decline(
        self,
        turn: Turn,
        leader: str,
        attempt: int,
        reason: str,
        suspects: frozenset[str] = frozenset(),
        told_by: frozenset[str] = frozenset(),
    ) -> None:
        if leader != self._me:
            decline = Decline(
                head=self.head,
                attempt=attempt,
                reason=reason[:300],
                suspects=tuple(sorted(suspects)),
                told_by=tuple(sorted(told_by)),
            )
            turn.do(Send(leader, decline))

    def _median_attempt(self) -> int:
        """The median attempt of the roster members on this head, this peer included."""
        here, roster = self._swarm.live_at(self.head), self._group.roster
        attempts = [status.attempt for peer_id, status in here.items() if peer_id in roster]
        attempts = sorted([*attempts, self.attempt])
        return attempts[len(attempts) // 2]

    def _skip_to_median_attempt(self, turn: Turn) -> bool:
        """Skip to the median attempt if that is later: half of the members do not take part in this one any more."""
        # Bounded steps: peers that announce huge attempts cannot use up all of this peer's attempts.
        next_attempt = min(self._median_attempt(), self.attempt + 2 * len(self._order), MAX_ATTEMPT)
        if next_attempt <= self.attempt or not turn.passed(self._skipped_at + self._timing.reaction_s):
            return False
        self._skipped_at = turn.now
        self._leave_attempt(turn, next_attempt)
        return True

    def _leave_attempt(self, turn: Turn, next_attempt: int) -> None:
        if self.stage is Stage.REDUCE:
            turn.do(CancelReduce())
        self.attempt = min(MAX_ATTEMPT, next_attempt)
        self.stage, self._lead, self._leader_could_propose_at = Stage.GATHER, None, None
        self._leader_failed = ""
        self._proposals = {a: plan for a, plan in self._proposals.items() if a >= self.attempt}

    def _fail(self, turn: Turn, failure: Failure) -> None:
        """Record why this attempt failed, and go to the next one after a pause."""
        self.failures = [*self.failures[-MAX_FAILURES:], failure.reason]
        self._blame.attempt_failed(failure.suspects)
        # If it has a culprit, the next attempt can do without it; only if that fails, too, was there too little time.
        if self.stage is not Stage.GATHER and (not failure.suspects or len(self.failures) > 1):
            self._timing.attempt_failed(turn.now - self._accepted_at)
        self._not_before = turn.now + self._timing.pause_s(len(self.failures))
        self._leave_attempt(turn, self.attempt + 1)
