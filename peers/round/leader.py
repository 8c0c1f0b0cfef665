"""The leader's side of a round: who has joined, the attempt that is open, and how it ends. Pure, like peers/rounds.py.

joins -> group -> votes [-> audit -> votes] -> commit | abort, and again
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from peers import membership
from peers.membership import View
from peers.round.aggregation import Aggregation
from peers.round.audit import contradictions, owners_to_audit
from peers.round.messages import Abort, Audit, Commit, Group, Join, Proposal, RoundMessage, Vote
from peers.round.verdicts import Blame, disputes, dissenters


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Deadlines of one round, in seconds."""

    gather_s: float
    """From the first member that is ready to the group, if not all live trainers come sooner."""
    longest_gather_s: float = float("inf")
    """What a leader waits for them at most, by its own work; members are patient by `gather_s`."""
    attempt_s: float
    """From the group to the last vote, and as long again for an audit."""
    stall_s: float = 5.0
    """A stream of the reduction that moves no byte for so long is broken."""
    connect_s: float = 10.0
    """To all others, for the streams of an attempt; a member that has not heard of it would not come at all."""
    carry_s: float = 30.0
    """In place of `gather_s`, where all who are ready bring work of an earlier epoch: they are a whole epoch early."""
    follow_s: float = 0.0
    """For one that is about to have the last commit too, from the first member that is ready."""
    retry_s: float = 0.3
    """Between a failed attempt and the next: time for the news of a death to arrive."""
    resend_s: float = 2.0
    """A member that waits repeats its join this often."""
    regain_s: float = 3.0
    """A peer that has lost most of the others a moment ago waits for them to be back, so long in a round at most."""
    doubt_s: float = 3.0
    """How long a member in doubt waits for the answer of a peer that has gone on."""
    ask_s: float = 1.0
    """After so long without an answer it asks all that have gone on, and again every so often."""


@dataclass(frozen=True)
class Gathered:
    """How a leader's first group of a round came about."""

    seconds: float
    """From the first member that was ready."""
    missing: bool
    """The group was formed without a peer that it should have waited for."""


FOLLOW_EVERY = 4
"""Epochs: so often a peer that has missed the last commit is waited for, until it has it too. Where rounds take most of
the time it would come too late for every one of them otherwise; and one that never comes costs the others little."""

_NAMED = 12
"""Ranks; a message's text is bounded."""

Letters = list[tuple[int, RoundMessage]]
"""(world rank, message) to send, this peer itself included."""


class Leader:
    """Of one round on one lineage, should the ballot fall on this peer."""

    def __init__(
        self,
        *,
        me: int,
        incarnation: int,
        fragment: int,
        epoch: int,
        lineage: str,
        parent: str,
        timing: Timing,
        aggregation: Aggregation,
        barred: Iterable[int],
        unawaited: Iterable[int],
        first_step: int,
    ) -> None:
        """`unawaited`: taken if they come; `first_step`: the nominal step that this epoch began with."""
        self._first_step = first_step
        self._me, self._incarnation = me, incarnation
        self._fragment, self._epoch, self._lineage, self._parent = fragment, epoch, lineage, parent
        self.timing, self._aggregation = timing, aggregation
        self.joins: dict[int, Join] = {}
        self.open: Group | None = None
        self.failures: list[str] = []
        """Why each failed attempt failed."""
        self.excluded = set(barred)
        """Changed in place only: whom the member follows (peers/round/following.py) goes by the same set."""
        self.unawaited = frozenset(unawaited)
        self.offenders: set[int] = set()
        """Who has been left out of attempts, or left as a leader, though it is there."""
        self.proven: set[int] = set()
        """Those of them whose sums are false, as this peer has seen itself."""
        self.gathered: Gathered | None = None
        # Of work of an earlier epoch, and of this one.
        self._first_carried_at = self._first_join_at = float("inf")
        # When each was last heard to follow this peer, and since when this peer leads.
        self._joined_at: dict[int, float] = {}
        self._leads_since = float("inf")
        # Whose commit this peer has told of without being in it; by then they show what came of it.
        self._committed: tuple[int, ...] = ()
        self._committed_until = float("inf")
        self._follow_until = float("inf")
        self._open_deadline = float("inf")
        self._votes: dict[int, Vote] = {}
        self._audit: Audit | None = None
        self._accusers: set[int] = set()
        # Whose sums somebody has called false: looked at again in every attempt from then on.
        self._suspected: set[int] = set()
        self._retry_at = 0.0
        self._num_attempts = 0
        self._blame = Blame(me)

    @property
    def times(self) -> list[float]:
        """When something is due, if nothing happens before."""
        times = [self._open_deadline, self._follow_until, self._committed_until]
        if self.joins and not self.open:
            times += [t for t in (self._gather_until, self._retry_at) if t > 0]
        return times

    @property
    def silent(self) -> set[int]:
        """Members of the open attempt that have not voted."""
        return set(self.open.ranks) - self._votes.keys() if self.open else set()

    def close(self) -> None:
        """The round is over."""
        self._open_deadline = self._follow_until = self._committed_until = float("inf")

    def on_join(self, sender: int, join: Join, now: float) -> None:
        if join.proposal.rank != sender or sender in self.excluded:
            return
        if not self.joins:
            self._first_carried_at = self._first_join_at = float("inf")
        if is_carried(join.proposal, self._first_step):
            self._first_carried_at = min(self._first_carried_at, now)
        else:
            self._first_join_at = min(self._first_join_at, now)
        self.joins[sender], self._joined_at[sender] = join, now

    def is_called(self, view: View, now: float) -> bool:
        """Whether most of those that train on this lineage follow this peer, by what they keep saying."""
        recently = now - 2 * self.timing.resend_s
        callers = [rank for rank in self.joins if rank != self._me and self._joined_at[rank] >= recently]
        return bool(callers) and 2 * len(callers) > len(membership.trainers_of(view, self._lineage))

    def stand_aside(self) -> None:
        """Another leads. What has been told this peer stays, and nobody has been waited for yet."""
        self._leads_since = float("inf")

    @property
    def _gather_until(self) -> float:
        gather_s = min(self.timing.gather_s, self.timing.longest_gather_s)
        return min(
            max(self._first_join_at, self._leads_since) + gather_s,
            max(self._first_carried_at, self._leads_since) + self.timing.carry_s,
        )

    def form(self, view: View, quiet: Collection[int], ballot: int, now: float) -> Letters:
        """A group, when everybody it waits for is there, or is late.

        Nobody waits for the `quiet` ones, of whom nothing has been heard for a few heartbeats. Nor is an attempt made
        with one that had joined before, unless many have fallen quiet at once: then it is this peer that hears badly.
        """
        self._leads_since = min(self._leads_since, now)
        is_behind = now < self._committed_until and any(rank in view for rank in self._committed)
        if self.open or now < self._retry_at or is_behind:
            # A leader that was not ready itself has not moved on with those whose commit it has told of.
            return []
        self._retry_at = 0.0
        trainers = membership.trainers_of(view, self._lineage)
        fallen = self.joins.keys() & set(quiet)
        left_out = self.excluded | (fallen if len(fallen) <= max(1, len(self.joins) // 4) else set())
        present = [r for r in sorted(self.joins) if r in view and r not in left_out]
        missing = set(trainers) - set(present) - left_out - set(quiet) - self.unawaited
        if not present or (missing and now < self._gather_until):
            return []
        self._follow_until = float("inf")
        first_at = min(self._first_join_at, self._first_carried_at)
        if now < (until := first_at + self.timing.follow_s) and self._is_followed(view, quiet):
            self._follow_until = until
            return []
        if self.gathered is None and self._first_join_at <= now:
            self.gathered = Gathered(now - max(self._first_join_at, self._leads_since), bool(missing))
        group = self._new_group([self.joins[r].proposal for r in present], view, ballot)
        self.open, self._votes = group, {}
        self._audit, self._accusers = None, set()
        self._open_deadline = now + self.timing.attempt_s
        return [(rank, group) for rank in group.ranks]

    def _is_followed(self, view: View, quiet: Collection[int]) -> bool:
        """Whether somebody's turn has come who brings work, and is only a commit behind."""
        return any(
            peer.state == "averaging"
            and peer.lineage == self._parent
            and rank not in self.excluded
            and rank not in quiet
            and (self._epoch + rank) % FOLLOW_EVERY == 0
            for rank, peer in view.items()
        )

    def _new_group(self, members: Sequence[Proposal], view: View, ballot: int) -> Group:
        self._num_attempts += 1
        name = (
            f"{self._lineage} {self._fragment} {self._me} {self._incarnation} {ballot} {self._num_attempts}"
        )
        ranks = tuple(member.rank for member in members)
        return Group(
            attempt=hashlib.sha256(name.encode()).hexdigest()[:32],
            fragment=self._fragment,
            epoch=self._epoch,
            lineage=self._lineage,
            leader=self._me,
            members=tuple(members),
            weights=self._aggregation.weights_of(members),
            data_width=membership.data_width_of(view, ranks),
        )

    def on_vote(self, sender: int, vote: Vote, now: float) -> Letters:
        group = self.open
        if group is None or vote.attempt != group.attempt or sender not in group.ranks:
            return []
        if vote.disproved and self._audit is not None:
            return self._on_accusation(sender, set(vote.disproved) & set(self._audit.owners), now)
        if not vote.anchor:
            suspects = set(vote.suspects) & set(group.ranks)
            self._blame.failed(sender, suspects, set(vote.told_by) & set(group.ranks))
            guilty = self._blame.guilty(group.ranks)
            return self.abort(guilty, f"peer {sender} lost {names(suspects) or 'the attempt'}", now)
        self._votes[sender] = vote
        if sender == self._me and self._accusers:
            return self._abort_for_accusers(now)
        if len(self._votes) < len(group.ranks):
            return []
        if unlike := dissenters(group, self._votes):
            for voter, owner in disputes(group, self._votes):
                self._blame.failed(voter, {owner})
            unlike = self._blame.guilty(group.ranks) or unlike
            # Who got or sent other bytes of a share has lost nothing of its state.
            resync = not disputes(group, self._votes)
            return self.abort(unlike, f"the digests of {names(unlike)} differ", now, resync=resync)
        if self._audit is None and (owners := self._owners_to_audit(group)):
            return self._begin_audit(group, owners, now)
        self.open, self._open_deadline = None, float("inf")
        self._committed, self._committed_until = group.ranks, now + self.timing.attempt_s
        for rank in group.ranks:
            del self.joins[rank]
        return [(rank, Commit(group, vote.anchor, vote.momentum)) for rank in group.ranks]

    def on_false_sums(self, owners: Iterable[int], now: float) -> Letters:
        """This peer's own audit has shown it: no second opinion is needed."""
        if self.open is None:
            return []
        left_out = set(owners) & set(self.open.ranks)
        return self.abort(left_out, f"{names(left_out)} reduced their shares falsely", now)

    def _owners_to_audit(self, group: Group) -> tuple[int, ...]:
        demanded = {owner for vote in self._votes.values() for owner in vote.audit}
        return owners_to_audit(group, demanded, self._suspected, self._aggregation.audit)

    def _begin_audit(self, group: Group, owners: tuple[int, ...], now: float) -> Letters:
        if contradicting := contradictions(group, self._votes, owners):
            for member, owner in contradicting:
                self._blame.failed(member, {owner})
            guilty = self._blame.guilty(group.ranks)
            involved = {rank for pair in contradicting for rank in pair}
            return self.abort(guilty, f"{names(involved)} disagree on what they sent each other", now)
        index = {rank: place for place, rank in enumerate(group.ranks)}
        inputs = tuple(
            tuple(self._votes[rank].sent[index[owner]] for rank in group.ranks) for owner in owners
        )
        self._audit = Audit(self._fragment, self._lineage, group.attempt, owners, inputs)
        self._votes, self._open_deadline = {}, now + self.timing.attempt_s
        return [(rank, self._audit) for rank in group.ranks]

    def _on_accusation(self, sender: int, owners: set[int], now: float) -> Letters:
        """What this peer finds itself decides; until then it only takes note."""
        self._suspected |= owners
        self._accusers.add(sender)
        return self._abort_for_accusers(now) if self._me in self._votes else []

    def _abort_for_accusers(self, now: float) -> Letters:
        accusers = set(self._accusers)
        return self.abort(accusers, f"{names(accusers)} called sums false that are not", now)

    def on_lost(self, gone: set[int], back: set[int], now: float) -> Letters:
        """These have died or left; those that are `back` are others by now, under the same rank."""
        for rank in gone:
            self.joins.pop(rank, None)
        if self.open and (lost := gone & set(self.open.ranks)):
            # Or it could be in one attempt after the other, and end each of them so.
            self.excluded |= lost & back
            return self.abort(lost, f"lost {names(lost)}", now, gone=True)
        return []

    def on_tick(self, now: float) -> Letters:
        if now >= self._committed_until:
            self._committed, self._committed_until = (), float("inf")
        if self.open is None or now < self._open_deadline:
            return []
        silent = self.silent
        # Where nobody has voted somebody keeps all others waiting, and this peer cannot tell who.
        left_out = silent if self._votes else set[int]()
        return self.abort(left_out, f"no vote from {names(silent)} in {self.timing.attempt_s:g} s", now)

    def abort(
        self, left_out: set[int], reason: str, now: float, *, gone: bool = False, resync: bool = False
    ) -> Letters:
        """End the open attempt; the members that are left stay joined for the next one.

        A live peer that is left out waits until the others have committed, and then catches up. Those that are `gone`
        may join again.
        """
        group, self.open, self._open_deadline = self.open, None, float("inf")
        assert group is not None
        self.failures.append(reason)
        told = set(group.ranks) - (left_out if gone else set())
        if not gone:
            self.excluded |= left_out
            self.offenders |= left_out
        for rank in left_out:
            self.joins.pop(rank, None)
        self._retry_at = now + (0.0 if gone else self.timing.retry_s)
        message = Abort(self._fragment, self._lineage, group.attempt, tuple(sorted(left_out)), resync, reason)
        return [(rank, message) for rank in sorted(told)]


def is_carried(proposal: Proposal, first_step: int) -> bool:
    """Whether this work was done in an earlier epoch than the one that began with this nominal step."""
    return proposal.step <= first_step


def names(ranks: Iterable[int]) -> str:
    """For people: peer 3; peers 1, 4; nothing for nobody. Of many the first, and how many more there are."""
    ascending = sorted(ranks)
    listed = ", ".join(map(str, ascending[:_NAMED]))
    if len(ascending) > _NAMED:
        listed += f" and {len(ascending) - _NAMED} more"
    return f"peer {listed}" if len(ascending) == 1 else f"peers {listed}" if listed else ""
