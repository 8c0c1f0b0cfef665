"""The round: averaging one fragment on top of one lineage, as a pure state machine.

    gather -> reduce -> vote -> commit | abort

Every peer runs one `Round` per (fragment, lineage). It is a member always, and the leader when the ballot says so.
Clock, messages and the view of the swarm are arguments; what is to be done comes back as actions. The daemon carries
them out (peers/averaging.py) and tells the outcome as further events.

Safety. A commit exists once the leader holds equal votes of all members of an attempt. A member that has voted is *in
doubt* until it hears how the attempt ended; it goes on to other attempts only after the leader it voted to is lost, and
a commit that reaches it late still counts if it holds that attempt's result. Two groups that commit on one lineage all
the same (a partition) are a fork, which peers/membership.py resolves.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from peers import membership
from peers.aggregation import Aggregation
from peers.membership import View
from peers.records import Announcement
from peers.round_messages import Abort, Ask, Commit, Group, Join, Proposal, RoundMessage, Vote
from peers.verdicts import Blame, disputes, dissenters

TOLERATED_OF_LEADER = 1
"""Attempts of one round that a member loses to its leader before it looks for another."""
_DEFAULT_AGGREGATION = Aggregation()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Deadlines of one round, in seconds."""

    gather_s: float
    """From the first member that is ready to the group, if not all live trainers come sooner."""
    attempt_s: float
    """From the group to the last vote."""
    retry_s: float = 0.3
    """Between a failed attempt and the next: time for the news of a death to arrive."""
    resend_s: float = 2.0
    """A member that waits repeats its join this often."""
    doubt_s: float = 3.0
    """How long a member in doubt waits for the answer of a peer that has gone on."""
    ask_s: float = 1.0
    """After so long without an answer it asks all that have gone on, and again every so often."""


@dataclass(frozen=True)
class Send:
    """Send to one peer of the swarm, never to itself."""

    rank: int
    message: RoundMessage


@dataclass(frozen=True)
class Reduce:
    """Start reducing; answer with `on_reduced` or `on_reduce_failed`."""

    group: Group


@dataclass(frozen=True)
class Cancel:
    """Stop the reduction that runs; its outcome no longer matters."""


@dataclass(frozen=True)
class Apply:
    """Advance anchor, momentum, epoch and lineage together by the result this peer holds. The round is over."""

    commit: Commit


@dataclass(frozen=True)
class CatchUp:
    """Adopt the state of this peer, and bring the local work to the round that follows it. This round is over."""

    rank: int
    reason: str
    contributed: bool = False
    """This peer's work is in that state already."""
    resync: bool = False
    """The bits held here are wrong, though the lineage may be the same."""


@dataclass(frozen=True)
class Gathered:
    """How a leader's first group of a round came about."""

    seconds: float
    """From the first member that was ready."""
    missing: bool
    """The group was formed without a peer that it should have waited for."""


Action = Send | Reduce | Cancel | Apply | CatchUp


class Phase(Enum):
    IDLE = "idle"
    """The worker still trains."""
    SEEKING = "seeking"
    """Ready; a leader has been told."""
    REDUCING = "reducing"
    VOTED = "voted"
    OVER = "over"


class Round:
    """One peer's part in the round of one fragment on one lineage. All times in seconds of any one clock."""

    def __init__(
        self,
        *,
        me: int,
        incarnation: int,
        fragment: int,
        epoch: int,
        lineage: str,
        timing: Timing,
        view: View,
        aggregation: Aggregation = _DEFAULT_AGGREGATION,
        barred: Iterable[int] = (),
    ) -> None:
        """`barred`: members that this peer neither follows nor, as the leader, takes or waits for."""
        self.me, self.fragment, self.epoch, self.lineage = me, fragment, epoch, lineage
        self.timing, self._aggregation = timing, aggregation
        self.phase = Phase.IDLE
        self.failures: list[str] = []
        """Why each failed attempt failed."""
        self.gathered: Gathered | None = None
        """Of a leader."""
        self._incarnation = incarnation
        self._view = view
        self._inbox: deque[tuple[int, RoundMessage]] = deque()
        # As a member.
        self._proposal: Proposal | None = None
        self._ballot = 0
        self._leader: int | None = None
        self._group: Group | None = None
        self._holding: Commit | None = (
            None  # what this peer has voted for, holds the result of, and may still commit
        )
        # Attempts voted for whose end this peer has not heard of, oldest first.
        self._doubts: list[str] = []
        self._num_asked = 0
        self._ask_again_at = float("inf")
        self._committed_by: dict[
            int, bool
        ] = {}  # who told of another attempt's commit: is this peer's work in it?
        self._phase_deadline = float("inf")
        self._resend_at = float("inf")
        # As the leader.
        self._joins: dict[int, Join] = {}
        self._first_join_at = 0.0
        self._open: Group | None = None
        self._open_deadline = float("inf")
        self._votes: dict[int, Vote] = {}
        self._excluded = set(barred)
        self.offenders: set[int] = set()
        """Whom this peer has left out of attempts, or left as leaders, though they are there."""
        self._lost_to_leader = 0
        self._retry_at = 0.0
        self._num_attempts = 0
        self._blame = Blame(me)

    # Events

    def on_ready(self, proposal: Proposal, now: float) -> list[Action]:
        """The worker's weights are in *out*."""
        if self.phase is not Phase.IDLE:
            return []
        self._proposal = proposal
        actions = self._check_ahead(now)
        return actions or self._finish(self._seek(now), now)

    def on_view(self, view: View, now: float) -> list[Action]:
        """Somebody came, left, was lost, or changed its status."""
        # The same rank with another incarnation is another peer to this round: what the old one brought died with it.
        gone = {r for r, old in self._view.items() if r not in view or view[r].incarnation != old.incarnation}
        self._view = view
        for rank in gone:
            self._joins.pop(rank, None)
        actions: list[Action] = []
        if self._open and (lost := gone & set(self._open.ranks)):
            actions += self._abort(lost, f"lost {_ranks(lost)}", now, gone=True)
        if self.phase in (Phase.SEEKING, Phase.REDUCING, Phase.VOTED) and self._has_left(gone):
            actions += self._leave_leader(now)
        actions += self._check_ahead(now)
        return self._finish(actions, now)

    def on_message(self, sender: int, message: RoundMessage, now: float) -> list[Action]:
        """A message of this fragment and lineage."""
        self._inbox.append((sender, message))
        return self._finish([], now)

    def on_reduced(self, attempt: str, vote: Vote, now: float) -> list[Action]:
        """The reduction of this attempt is done, and `vote` says what this peer would commit."""
        if self.phase is not Phase.REDUCING or self._group is None or self._group.attempt != attempt:
            return []
        self.phase = Phase.VOTED
        self._doubts.append(attempt)
        self._holding = Commit(self._group, vote.anchor, vote.momentum)
        self._phase_deadline = now + self.timing.attempt_s
        return self._finish(self._send(self._group.leader, vote), now)

    def on_reduce_failed(self, attempt: str, suspects: Iterable[int], now: float) -> list[Action]:
        """The reduction of this attempt failed, and was lost to these members as far as this peer can tell."""
        if self.phase is not Phase.REDUCING or self._group is None or self._group.attempt != attempt:
            return []
        leader, suspects = self._group.leader, set(suspects)
        self._return_to_seeking(now)
        vote = Vote(self.fragment, self.lineage, attempt, suspects=tuple(sorted(suspects)))
        actions = self._send(leader, vote)
        if leader in suspects - {self.me}:
            self._lost_to_leader += 1
            if self._lost_to_leader > TOLERATED_OF_LEADER:
                actions += self._depose(leader, now)
        return self._finish(actions, now)

    def on_tick(self, now: float) -> list[Action]:
        """Call at `deadline` or later."""
        actions: list[Action] = []
        if self._open and now >= self._open_deadline:
            silent = set(self._open.ranks) - self._votes.keys()
            # Where nobody has voted somebody keeps all others waiting, and this peer cannot tell who.
            left_out = silent if self._votes else set[int]()
            reason = f"no vote from {_ranks(silent)} in {self.timing.attempt_s:g} s"
            actions += self._abort(left_out, reason, now)
        if now >= self._phase_deadline:
            self._ballot += 1
            actions += self._leave_leader(now)
        if self.phase is Phase.SEEKING and now >= self._resend_at:
            actions += self._seek(now)
        actions += self._check_ahead(now)
        return self._finish(actions, now)

    @property
    def deadline(self) -> float:
        """When `on_tick` is due, if nothing happens before."""
        times = [self._phase_deadline, self._open_deadline, self._resend_at]
        if self._num_asked:
            times.append(self._ask_again_at)
        if self._joins and not self._open and self.phase is not Phase.OVER:
            times += [t for t in (self._first_join_at + self.timing.gather_s, self._retry_at) if t > 0]
        return min(times)

    @property
    def waits_for(self) -> str:
        """What this peer waits for, for people."""
        if self.phase is Phase.SEEKING:
            missing = sorted(set(membership.trainers_of(self._view, self.lineage)) - self._joins.keys())
            if self._leader != self.me:
                return f"the group of peer {self._leader}"
            return f"peers {', '.join(map(str, missing))}" if missing else "the next attempt"
        return {Phase.REDUCING: "the sums", Phase.VOTED: "the votes"}.get(self.phase, "")

    # Member

    def _seek(self, now: float) -> list[Action]:
        """Tell the leader of the current ballot that this peer is ready."""
        assert self._proposal is not None
        if self.phase is not Phase.SEEKING or self._phase_deadline == float("inf"):
            # Past the leader's own deadline, twice: it is alive but does not lead.
            self._phase_deadline = now + 2 * self.timing.gather_s + self.timing.attempt_s
        self.phase, self._group = Phase.SEEKING, None
        leader = self._leader_of_ballot()
        self._leader = self.me if leader is None else leader
        self._resend_at = now + self.timing.resend_s
        in_doubt = self._doubts[-1] if self._doubts else ""
        return self._send(self._leader, Join(self.fragment, self.lineage, self._proposal, in_doubt))

    def _leader_of_ballot(self) -> int | None:
        view = {rank: peer for rank, peer in self._view.items() if rank not in self._excluded - {self.me}}
        return membership.leader_of(view, self.lineage, self._ballot)

    def _has_left(self, gone: set[int]) -> bool:
        """Whether the leader is lost, or has gone on without this peer hearing how the attempt ended."""
        leader = None if self._leader is None else self._view.get(self._leader)
        return leader is None or leader.world_rank in gone or leader.lineage != self.lineage

    def _leave_leader(self, now: float) -> list[Action]:
        """The leader is lost or silent: find the next one. What was voted for stays in doubt."""
        cancel: list[Action] = [Cancel()] if self.phase is Phase.REDUCING else []
        self._return_to_seeking(now)
        self._phase_deadline = float("inf")
        return cancel + self._seek(now)

    def _depose(self, leader: int, now: float) -> list[Action]:
        """It leads, and spoils what it leads: nobody else can leave it out."""
        self._lost_to_leader = 0
        self._excluded.add(leader)
        self.offenders.add(leader)
        self.failures.append(f"peer {leader} leads, and spoils every attempt")
        return self._leave_leader(now)

    def _return_to_seeking(self, now: float) -> None:
        self.phase, self._group = Phase.SEEKING, None
        self._phase_deadline = now + 2 * self.timing.gather_s + self.timing.attempt_s
        self._resend_at = now + self.timing.resend_s

    def _on_group(self, sender: int, group: Group, now: float) -> list[Action]:
        if self.phase is not Phase.SEEKING or sender != self._leader or group.leader != sender:
            return []
        if self._num_asked:
            # Another attempt may be committed already: it has asked, and hears of it or catches up.
            return []
        mine = [member for member in group.members if member.rank == self.me]
        if (
            mine != [self._proposal]
            or group.epoch != self.epoch
            or group.weights != self._aggregation.weights_of(group.members)
        ):
            return []
        # The result of an earlier attempt is given up, and the doubt about its end is not.
        self.phase, self._group, self._holding = Phase.REDUCING, group, None
        # Later than the leader's own deadline, which began before the group was here.
        self._phase_deadline = now + self.timing.attempt_s + 2 * self.timing.resend_s
        self._resend_at = float("inf")
        return [Reduce(group)]

    def _on_commit(self, sender: int, commit: Commit, now: float) -> list[Action]:
        holding = self._holding
        if self._proposal is None:
            return []
        if holding is not None and holding.group.attempt == commit.group.attempt and holding != commit:
            # No leader commits what this member has not voted for: somebody makes it up.
            return []
        if holding == commit:
            self._close()
            return [Apply(commit)]
        # Believed as soon as the sender shows the state that came of it, which is right after this.
        self._committed_by[sender] = self.me in commit.group.ranks
        return self._check_ahead(now)

    def _on_abort(self, sender: int, abort: Abort, now: float) -> list[Action]:
        if sender != self._leader or self.phase not in (Phase.SEEKING, Phase.REDUCING, Phase.VOTED):
            return []
        current = self._holding.group if self._holding else self._group
        if current is None or current.attempt != abort.attempt:
            return []
        cancel: list[Action] = [Cancel()] if self.phase is Phase.REDUCING else []
        self._holding = None
        if abort.attempt in self._doubts:
            self._doubts.remove(abort.attempt)
        if self.me in abort.excluded and abort.resync:
            self._close()
            return [*cancel, CatchUp(sender, f"left out of the round: {abort.reason}", resync=True)]
        self._return_to_seeking(now)
        return cancel

    def _check_ahead(self, now: float) -> list[Action]:
        """Somebody's state supersedes ours: commit late if we hold that very result, else catch up."""
        if self._proposal is None or self.phase is Phase.OVER:
            return []
        ahead = membership.ahead_of(self._view, self.me)
        if ahead is None:
            self._num_asked = 0
            return []
        told = [self._committed_by[r] for r in self._committed_by if self._has_lineage(r, ahead.lineage)]
        is_attempting = self.phase in (Phase.REDUCING, Phase.VOTED)
        older_doubts = self._doubts[:-1] if self.phase is Phase.VOTED else self._doubts
        if older_doubts and not told and (asked := self._ask(ahead, now)) is not None:
            return asked
        if is_attempting and not any(told):
            return []
        cancel: list[Action] = [Cancel()] if self.phase is Phase.REDUCING else []
        self._close()
        reason = f"peer {ahead.world_rank} is ahead, at epoch {ahead.epoch}"
        return [*cancel, CatchUp(ahead.world_rank, reason, contributed=any(told))]

    def _ask(self, ahead: Announcement, now: float) -> list[Action] | None:
        """Whether this peer's work is in the state that is ahead. None: nobody has told in time."""
        if self._num_asked and now < self._ask_again_at:
            return []
        if self._num_asked * self.timing.ask_s >= self.timing.doubt_s:
            self._ask_again_at = now + self.timing.ask_s
            return None
        there = [rank for rank in sorted(self._view) if self._has_lineage(rank, ahead.lineage)]
        # At first the news is ahead of the commit's own message, most likely: not worth asking everybody.
        asked = there if self._num_asked else [ahead.world_rank]
        self._num_asked, self._ask_again_at = self._num_asked + 1, now + self.timing.ask_s
        return [action for rank in asked for action in self._send(rank, Ask(self.fragment, self.lineage))]

    def _has_lineage(self, rank: int, lineage: str) -> bool:
        return rank in self._view and self._view[rank].lineage == lineage

    def _close(self) -> None:
        self.phase = Phase.OVER
        self._phase_deadline = self._resend_at = self._open_deadline = float("inf")
        self._num_asked = 0

    # Leader

    def _on_join(self, sender: int, join: Join, now: float) -> list[Action]:
        if join.proposal.rank == sender and sender not in self._excluded:
            if not self._joins:
                self._first_join_at = now
            self._joins[sender] = join
        return []

    def _lead(self, now: float) -> list[Action]:
        """Form a group when this peer is the leader and everybody it waits for is there, or is late."""
        if self._open or self.phase in (Phase.REDUCING, Phase.VOTED, Phase.OVER) or now < self._retry_at:
            return []
        if self._num_asked:
            return []
        trainers = membership.trainers_of(self._view, self.lineage)
        if self._leader_of_ballot() != self.me:
            return []
        present = [r for r in sorted(self._joins) if r in self._view and r not in self._excluded]
        missing = set(trainers) - set(present) - self._excluded
        if not present or (missing and now < self._first_join_at + self.timing.gather_s):
            return []
        if self.gathered is None:
            self.gathered = Gathered(now - self._first_join_at, bool(missing))
        group = self._new_group([self._joins[r].proposal for r in present])
        self._open, self._votes = group, {}
        self._open_deadline = now + self.timing.attempt_s
        return [action for rank in group.ranks for action in self._send(rank, group)]

    def _new_group(self, members: list[Proposal]) -> Group:
        self._num_attempts += 1
        name = f"{self.lineage} {self.fragment} {self.me} {self._incarnation} {self._ballot} {self._num_attempts}"
        ranks = tuple(member.rank for member in members)
        return Group(
            attempt=hashlib.sha256(name.encode()).hexdigest()[:32],
            fragment=self.fragment,
            epoch=self.epoch,
            lineage=self.lineage,
            leader=self.me,
            members=tuple(members),
            weights=self._aggregation.weights_of(members),
            data_width=membership.data_width_of(self._view, ranks),
        )

    def _on_vote(self, sender: int, vote: Vote, now: float) -> list[Action]:
        if self._open is None or vote.attempt != self._open.attempt or sender not in self._open.ranks:
            return []
        if not vote.anchor:
            suspects = set(vote.suspects) & set(self._open.ranks)
            self._blame.failed(sender, suspects)
            guilty = self._blame.guilty(self._open.ranks)
            return self._abort(guilty, f"peer {sender} lost {_ranks(suspects) or 'the attempt'}", now)
        self._votes[sender] = vote
        if len(self._votes) < len(self._open.ranks):
            return []
        if unlike := dissenters(self._open, self._votes):
            for voter, owner in disputes(self._open, self._votes):
                self._blame.failed(voter, {owner})
            unlike = self._blame.guilty(self._open.ranks) or unlike
            return self._abort(unlike, f"the digests of {_ranks(unlike)} differ", now, resync=True)
        group, self._open, self._open_deadline = self._open, None, float("inf")
        for rank in group.ranks:
            del self._joins[rank]
        commit = Commit(group, vote.anchor, vote.momentum)
        return [action for rank in group.ranks for action in self._send(rank, commit)]

    def _abort(
        self, left_out: set[int], reason: str, now: float, *, gone: bool = False, resync: bool = False
    ) -> list[Action]:
        """End the open attempt; the members that are left stay joined for the next one.

        A live peer that is left out waits until the others have committed, and then catches up. Those that are `gone`
        may join again.
        """
        group, self._open, self._open_deadline = self._open, None, float("inf")
        assert group is not None
        self.failures.append(reason)
        told = set(group.ranks) - (left_out if gone else set())
        if not gone:
            self._excluded |= left_out
            self.offenders |= left_out
        for rank in left_out:
            self._joins.pop(rank, None)
        self._retry_at = now + (0.0 if gone else self.timing.retry_s)
        abort = Abort(self.fragment, self.lineage, group.attempt, tuple(sorted(left_out)), resync, reason)
        return [action for rank in sorted(told) for action in self._send(rank, abort)]

    # Both

    def _send(self, rank: int, message: RoundMessage) -> list[Action]:
        if rank != self.me:
            return [Send(rank, message)]
        self._inbox.append((rank, message))
        return []

    def _finish(self, actions: list[Action], now: float) -> list[Action]:
        """Work off what this peer has sent itself, then lead if it can."""
        while True:
            while self._inbox:
                actions += self._dispatch(*self._inbox.popleft(), now)
            led = self._lead(now)
            actions += led
            if not led and not self._inbox:
                return actions

    def _dispatch(self, sender: int, message: RoundMessage, now: float) -> list[Action]:
        match message:
            case Commit():
                return self._on_commit(sender, message, now) if self.phase is not Phase.OVER else []
            case Join():
                return self._on_join(sender, message, now)
            case Group():
                return self._on_group(sender, message, now)
            case Vote():
                return self._on_vote(sender, message, now)
            case Abort():
                return self._on_abort(sender, message, now)
        return []  # an Ask about a lineage that is still open: the answer comes when it is not


def _ranks(ranks: Iterable[int]) -> str:
    listed = ", ".join(map(str, sorted(ranks)))
    return f"peer {listed}" if listed and "," not in listed else f"peers {listed}" if listed else ""
