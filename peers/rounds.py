"""The round: averaging one fragment on top of one lineage, as a pure state machine.

    gather -> reduce -> vote [-> audit -> vote] -> commit | abort

Every peer runs one `Round` per (fragment, lineage). It is a member always, and the leader when the ballot says so.
Clock, messages and the view of the swarm are arguments; what is to be done comes back as actions. The daemon carries
them out (peers/averaging.py) and tells the outcome as further events.

Safety. A commit exists once the leader holds equal votes of all members of an attempt. A member that has voted is *in
doubt* until it hears how the attempt ended; it goes on to other attempts only after the leader it voted to is lost, and
a commit that reaches it late still counts if it holds that attempt's result. Two groups that commit on one lineage all
the same (a partition) are a fork, which peers/membership.py resolves.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from enum import Enum
from types import MappingProxyType

from peers import membership
from peers.membership import View
from peers.records import Announcement
from peers.round.actions import Action, Apply, Cancel, CatchUp, Inspect, Reduce, Send
from peers.round.aggregation import Aggregation
from peers.round.audit import most_audited
from peers.round.following import Following
from peers.round.leader import Gathered, Leader, Letters, Timing, is_carried
from peers.round.messages import Abort, Ask, Audit, Commit, Group, Join, Proposal, RoundMessage, Vote
from peers.round.standing import Standing

_DEFAULT_AGGREGATION = Aggregation()
_NOBODY: View = MappingProxyType({})


class Phase(Enum):
    IDLE = "idle"
    """The worker still trains."""
    SEEKING = "seeking"
    """Ready; a leader has been told."""
    REDUCING = "reducing"
    VOTED = "voted"
    AUDITING = "auditing"
    """Voted, and looking at other owners' sums before it votes again."""
    OVER = "over"


_ATTEMPTING = (Phase.REDUCING, Phase.VOTED, Phase.AUDITING)
_AT_WORK = (Phase.REDUCING, Phase.AUDITING)
"""There is something to cancel."""


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
        unawaited: Iterable[int] = (),
        num_left_out: int = 0,
        parent: str = "",
        quiet: frozenset[int] = frozenset(),
        lost: View = _NOBODY,
        first_step: int = -1,
    ) -> None:
        """`barred`: members that this peer neither follows nor, as the leader, takes or waits for; those that are
        `unawaited` it takes, and does not wait for. `num_left_out`: rounds in a row that the others have committed
        without this peer, which was ready, or led by another than it would have followed.

        `parent` is the lineage before the last commit; `quiet` and `lost` as in `on_view`; `first_step` is
        the nominal step that this epoch began with: what was copied by then is work of an earlier one.
        """
        self.me, self.fragment, self.epoch, self.lineage = me, fragment, epoch, lineage
        self._aggregation = aggregation
        self.phase = Phase.IDLE
        self._view = view
        self._quiet, self._lost = quiet - {me}, lost
        self._regain_until = float("inf")
        self._inbox: deque[tuple[int, RoundMessage]] = deque()
        self._lead = Leader(
            me=me,
            incarnation=incarnation,
            fragment=fragment,
            epoch=epoch,
            lineage=lineage,
            parent=parent,
            timing=timing,
            aggregation=aggregation,
            barred=barred,
            unawaited=unawaited,
            first_step=first_step,
        )
        self._first_step = first_step
        self._following = Following(
            me=me, lineage=lineage, excluded=self._lead.excluded, num_left_out=num_left_out
        )
        self._proposal: Proposal | None = None
        self._group: Group | None = None
        # What this peer has voted for, holds the result of, and may still commit; and that vote.
        self._holding: Commit | None = None
        self._vote: Vote | None = None
        # Attempts voted for whose end this peer has not heard of, oldest first.
        self._doubts: list[str] = []
        self._num_asked = 0
        self._ask_again_at = float("inf")
        # Who told of another attempt's commit: is this peer's work in it?
        self._committed_by: dict[int, bool] = {}
        self._phase_deadline = float("inf")
        self._resend_at = float("inf")
        # Of the attempt held: the owners whose sums this peer wants looked at, and whether the leader has seen to it.
        self._demanded: tuple[int, ...] = ()
        self._has_audited = False

    @property
    def timing(self) -> Timing:
        return self._lead.timing

    @timing.setter
    def timing(self, timing: Timing) -> None:
        self._lead.timing = timing

    @property
    def leader(self) -> int | None:
        """Whom this peer follows; itself, if it leads."""
        return self._following.leader

    @property
    def is_led_by_first(self) -> bool:
        """Whether this peer follows the first of all that may lead, as far as it can tell."""
        return self._following.is_first

    @property
    def has_begun(self) -> bool:
        """Somebody is ready."""
        return bool(self._lead.joins) or self.phase is not Phase.IDLE

    @property
    def failures(self) -> list[str]:
        """Why each failed attempt failed."""
        return self._lead.failures

    @property
    def gathered(self) -> Gathered | None:
        """Of a leader."""
        return self._lead.gathered

    @property
    def offenders(self) -> set[int]:
        """Whom this peer has left out of attempts, or left as leaders, though they are there."""
        return self._lead.offenders

    @property
    def proven(self) -> set[int]:
        """Those of the offenders whose sums are false, as this peer has seen itself."""
        return self._lead.proven

    # Events

    def on_ready(self, proposal: Proposal, now: float) -> list[Action]:
        """The worker's weights are in *out*."""
        if self.phase is not Phase.IDLE:
            return []
        self._proposal = proposal
        actions = self._check_ahead(now)
        return actions or self._finish(self._seek(now), now)

    def on_view(
        self, view: View, now: float, quiet: frozenset[int] = frozenset(), lost: View = _NOBODY
    ) -> list[Action]:
        """Somebody came, left, was lost, or changed its status; or has not been heard of for a while (`quiet`).

        A quiet one may be gone or just busy: nobody waits for it, and its work counts as soon as it is back. `lost`:
        those lost a moment ago, who may be back at once. A leader that has lost most of the others gives them a little
        time.
        """
        # The same rank with another incarnation is another peer to this round: what the old one brought died with it.
        gone = {r for r, old in self._view.items() if r not in view or view[r].incarnation != old.incarnation}
        self._view, self._quiet, self._lost = view, quiet - {self.me}, lost
        actions = self._post(self._lead.on_lost(gone, gone & view.keys(), now))
        if self.phase in (Phase.SEEKING, *_ATTEMPTING) and self._following.has_lost_leader(view, gone):
            actions += self._leave_leader(now)
        elif self._is_led_by_another():
            actions += self._seek(now)
        if (
            self.phase is Phase.REDUCING
            and self._group is not None
            and (missed := gone & set(self._group.ranks))
        ):
            # Perhaps to this peer alone, and then the leader has to hear of it: their bytes will not come either.
            actions += self._give_up(missed, now)
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
        self._vote, self._demanded, self._has_audited = vote, vote.audit, False
        self._phase_deadline = now + self.timing.attempt_s
        return self._finish(self._send(self._group.leader, vote), now)

    def on_reduce_failed(
        self, attempt: str, suspects: Iterable[int], now: float, *, told_by: Iterable[int] = ()
    ) -> list[Action]:
        """The reduction of this attempt failed, and was lost to these members as far as this peer can tell, or as those
        in `told_by` say."""
        if self.phase is not Phase.REDUCING or self._group is None or self._group.attempt != attempt:
            return []
        return self._give_up(set(suspects), now, told_by=told_by)

    def on_audited(self, attempt: str, now: float) -> list[Action]:
        """The sums of the shares that were audited are what their owners have sent."""
        if self.phase is not Phase.AUDITING or self._group is None or self._group.attempt != attempt:
            return []
        assert self._vote is not None
        self.phase, self._phase_deadline = Phase.VOTED, now + self.timing.attempt_s
        return self._finish(self._send(self._group.leader, dataclasses.replace(self._vote, audit=())), now)

    def on_audit_failed(
        self,
        attempt: str,
        suspects: Iterable[int],
        disproved: Iterable[int],
        now: float,
        *,
        told_by: Iterable[int] = (),
    ) -> list[Action]:
        """The audit was lost to `suspects`, or it shows the sums of the owners in `disproved` to be false."""
        if self.phase is not Phase.AUDITING or self._group is None or self._group.attempt != attempt:
            return []
        self._forget_vote(attempt)
        return self._give_up(set(suspects), now, set(disproved), told_by=told_by)

    def _give_up(
        self, suspects: set[int], now: float, disproved: Iterable[int] = (), *, told_by: Iterable[int] = ()
    ) -> list[Action]:
        """Out of this attempt, and say why."""
        assert self._group is not None
        leader, attempt = self._group.leader, self._group.attempt
        disproved, told_by = set(disproved), set(told_by)
        self._return_to_seeking(now)
        self._lead.proven |= disproved
        self.offenders.update(disproved)
        if leader == self.me and disproved:
            return self._finish(self._post(self._lead.on_false_sums(disproved, now)), now)
        vote = Vote(
            self.fragment,
            self.lineage,
            attempt,
            suspects=tuple(sorted(suspects | disproved)),
            told_by=tuple(sorted(told_by)),
            disproved=tuple(sorted(disproved)),
        )
        actions = self._send(leader, vote)
        if leader in disproved:
            actions += self._depose(leader, "reduced its share falsely", now)
        elif leader in suspects - {self.me} and not told_by:
            if not self._following.tolerates_loss_to(leader):
                actions += self._depose(leader, "leads, and spoils every attempt", now)
            elif self._is_led_by_another():
                actions += self._seek(now)
        return self._finish(actions + self._check_ahead(now), now)

    def on_tick(self, now: float) -> list[Action]:
        """Call at `deadline` or later."""
        actions: list[Action] = []
        actions += self._post(self._lead.on_tick(now))
        if now >= self._phase_deadline:
            patient_with = self._following.patient_with
            if self._was_not_led() and patient_with not in (None, self.me):
                # It is there, and has led nowhere; if it is slow for once, that is forgotten.
                self.offenders.add(patient_with)
            actions += self._leave_leader(now, next_ballot=True)
        if self.phase is Phase.SEEKING and now >= self._resend_at:
            actions += self._seek(now)
        actions += self._check_ahead(now)
        return self._finish(actions, now)

    @property
    def deadline(self) -> float:
        """When `on_tick` is due, if nothing happens before."""
        times = [self._phase_deadline, self._resend_at]
        if self._num_asked:
            times.append(self._ask_again_at)
        if self.phase is Phase.SEEKING and self._is_cut_off():
            times.append(self._regain_until)
        if self.phase is not Phase.OVER:
            times += self._lead.times
        return min(times)

    @property
    def standing(self) -> Standing:
        """Where this peer is, and what it waits for, for people."""
        missing, is_at_work = self._missing(), self.phase not in (Phase.IDLE, Phase.OVER)
        waits = {Phase.REDUCING: "the sums", Phase.VOTED: "the votes", Phase.AUDITING: "the audit"}
        waits_for = waits.get(self.phase, "")
        if self.phase is Phase.SEEKING and self.leader != self.me:
            waits_for = f"the group of peer {self.leader}"
        elif self.phase is Phase.SEEKING:
            waits_for = f"peers {', '.join(map(str, missing))}" if missing else "the next attempt"
            waits_for = "a way back to the others" if self._is_cut_off() else waits_for
        leader = self.leader if is_at_work else None
        return Standing(step=self.phase.value, leader=leader, missing=tuple(missing), waits_for=waits_for)

    def _missing(self) -> list[int]:
        """Whom this peer waits for, if it leads: to join, or to vote after it has voted itself."""
        if self.leader != self.me:
            return []
        if self.phase is Phase.SEEKING:
            expected = set(membership.trainers_of(self._view, self.lineage)) - self._quiet
            return sorted(expected - self._lead.joins.keys() - self._lead.unawaited)
        return sorted(self._lead.silent) if self.phase is Phase.VOTED else []

    # Member

    def _seek(self, now: float) -> list[Action]:
        """Tell the leader of the current ballot that this peer is ready."""
        assert self._proposal is not None
        is_new = self.phase is not Phase.SEEKING or self._phase_deadline == float("inf")
        self.phase, self._group = Phase.SEEKING, None
        leader = self._following.choose(self._view, self._quiet)
        if is_new:
            self._phase_deadline = now + self._patience_s
            self._following.begin_to_wait()
        self._resend_at = now + self.timing.resend_s
        in_doubt = self._doubts[-1] if self._doubts else ""
        join = Join(self.fragment, self.lineage, self._proposal, in_doubt)
        return self._send(leader, join)

    def _is_led_by_another(self) -> bool:
        return self.phase is Phase.SEEKING and self._following.is_outranked(self._view, self._quiet)

    def _leave_leader(self, now: float, *, next_ballot: bool = False) -> list[Action]:
        """The leader is lost or silent: find the next one. What was voted for stays in doubt."""
        cancel: list[Action] = [Cancel()] if self.phase in _AT_WORK else []
        self._return_to_seeking(now)
        self._phase_deadline = float("inf")
        self._following.drop_leader(next_ballot=next_ballot)
        return cancel + self._seek(now)

    def _was_not_led(self) -> bool:
        """Has waited for its first leader, and for as long as any that has seen as long epochs may wait for others."""
        longest_s = 2 * self.timing.carry_s + self.timing.attempt_s
        return self.phase is Phase.SEEKING and self._following.ballot == 0 and self._patience_s >= longest_s

    def _depose(self, leader: int, crime: str, now: float) -> list[Action]:
        """It leads, and nobody else can leave it out."""
        self._lead.excluded.add(leader)
        self.offenders.add(leader)
        self.failures.append(f"peer {leader} {crime}")
        return self._leave_leader(now)

    @property
    def _patience_s(self) -> float:
        """Past the leader's own deadline, twice: it is alive but does not lead."""
        assert self._proposal is not None
        is_early = is_carried(self._proposal, self._first_step)
        return 2 * (self.timing.carry_s if is_early else self.timing.gather_s) + self.timing.attempt_s

    def _return_to_seeking(self, now: float) -> None:
        self.phase, self._group = Phase.SEEKING, None
        self._phase_deadline = now + self._patience_s
        self._following.begin_to_wait()
        self._resend_at = now + self.timing.resend_s

    def _on_group(self, sender: int, group: Group, now: float) -> list[Action]:
        may_lead = group.leader == sender and self._following.may_lead(sender)
        if self.phase is not Phase.SEEKING or not may_lead:
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
        # Of those that there are: a leader may invent members.
        if not self._following.follow(sender, min(len(group.ranks), len(self._view))):
            return self._depose(sender, "leads from one attempt to the next", now)
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
        if holding == commit and self._demanded and not self._has_audited:
            self._forget_vote(commit.group.attempt)
            return self._depose(commit.group.leader, "commits without the audit that was asked for", now)
        if holding == commit:
            self._close()
            return [Apply(commit)]
        # Believed as soon as the sender shows the state that came of it, which is right after this.
        self._committed_by[sender] = self.me in commit.group.ranks
        return self._check_ahead(now)

    def _on_abort(self, sender: int, abort: Abort, now: float) -> list[Action]:
        if sender != self.leader or self.phase not in (Phase.SEEKING, *_ATTEMPTING):
            return []
        current = self._holding.group if self._holding else self._group
        if current is None or current.leader != sender or current.attempt != abort.attempt:
            return []
        cancel: list[Action] = [Cancel()] if self.phase in _AT_WORK else []
        self._forget_vote(abort.attempt)
        if self.me in abort.excluded and abort.resync:
            self._close()
            return [*cancel, CatchUp(sender, f"left out of the round: {abort.reason}", resync=True)]
        self._return_to_seeking(now)
        return cancel + self._check_ahead(now)

    def _on_audit(self, sender: int, audit: Audit, now: float) -> list[Action]:
        group = self._group
        if self.phase is not Phase.VOTED or self._has_audited or sender != self.leader or group is None:
            return []
        most = most_audited(self._aggregation.audit, len(group.ranks))
        if audit.attempt != group.attempt or not audit.fits(group.ranks, most):
            return []
        if not self._is_quoted_rightly(audit, group):
            self._forget_vote(audit.attempt)
            return self._depose(sender, "says that this peer sent what it has not", now)
        # Others' demands may have crowded this peer's out; none at all may not.
        self._has_audited, self.phase = True, Phase.AUDITING
        self._phase_deadline = now + self.timing.attempt_s + 2 * self.timing.resend_s
        return [Inspect(group, audit)]

    def _is_quoted_rightly(self, audit: Audit, group: Group) -> bool:
        assert self._vote is not None
        me, said = group.ranks.index(self.me), dict(zip(group.ranks, self._vote.sent, strict=False))
        return all(
            digests[me] == said.get(owner) for owner, digests in zip(audit.owners, audit.inputs, strict=True)
        )

    def _forget_vote(self, attempt: str) -> None:
        """This attempt can be committed no more."""
        self._holding = None
        if attempt in self._doubts:
            self._doubts.remove(attempt)

    def _check_ahead(self, now: float) -> list[Action]:
        """Somebody's state supersedes ours: commit late if we hold that very result, else catch up."""
        if self._proposal is None or self.phase is Phase.OVER:
            return []
        ahead = membership.ahead_of(self._view, self.me)
        if ahead is None:
            self._num_asked = 0
            return []
        told = [self._committed_by[r] for r in self._committed_by if self._has_lineage(r, ahead.lineage)]
        is_attempting = self.phase in _ATTEMPTING
        has_voted = self.phase in (Phase.VOTED, Phase.AUDITING)
        older_doubts = self._doubts[:-1] if has_voted else self._doubts
        if older_doubts and not told and (asked := self._ask(ahead, now)) is not None:
            return asked
        if is_attempting and not any(told):
            return []
        cancel: list[Action] = [Cancel()] if self.phase in _AT_WORK else []
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
        self._phase_deadline = self._resend_at = float("inf")
        self._lead.close()
        self._num_asked = 0

    # Both

    def _send(self, rank: int, message: RoundMessage) -> list[Action]:
        if rank != self.me:
            return [Send(rank, message)]
        self._inbox.append((rank, message))
        return []

    def _post(self, letters: Letters) -> list[Action]:
        """What the leader's side has to say."""
        return [action for rank, message in letters for action in self._send(rank, message)]

    def _finish(self, actions: list[Action], now: float) -> list[Action]:
        """Work off what this peer has sent itself, then lead if it can."""
        while True:
            while self._inbox:
                actions += self._dispatch(*self._inbox.popleft(), now)
            led = self._form(now)
            actions += led
            if not led and not self._inbox:
                return actions

    def _form(self, now: float) -> list[Action]:
        """Form a group, if this peer leads."""
        if self.phase in (*_ATTEMPTING, Phase.OVER) or self._num_asked:
            return []
        if self._following.first_choice(self._view, self._quiet) != self.me:
            if not self._lead.is_called(self._view, now):
                self._lead.stand_aside()
                return []
            # They leave out whom this peer would follow.
            self._following.is_called = True
            if self.phase is Phase.SEEKING:
                return self._seek(now)
        if membership.ahead_of(self._view, self.me) is not None:
            # Whoever is ready goes there first.
            return []
        if self._lead.joins and self._is_cut_off():
            # To go on without them now would be a fork.
            self._regain_until = min(self._regain_until, now + self.timing.regain_s)
            if now < self._regain_until:
                return []
        return self._post(self._lead.form(self._view, self._quiet, self._following.ballot, now))

    def _is_cut_off(self) -> bool:
        """Whether most of the others were lost a moment ago, on whatever lineage: they may be ahead by now."""
        here, lost = (
            {rank for rank, peer in view.items() if peer.state in membership.EXPECTED_STATES}
            for view in (self._view, self._lost)
        )
        return membership.is_lesser_side(here - self._quiet, lost - self._lead.excluded - here)

    def _dispatch(self, sender: int, message: RoundMessage, now: float) -> list[Action]:
        match message:
            case Commit():
                return self._on_commit(sender, message, now) if self.phase is not Phase.OVER else []
            case Join():
                self._lead.on_join(sender, message, now)
                return []
            case Group():
                return self._on_group(sender, message, now)
            case Vote():
                return self._post(self._lead.on_vote(sender, message, now))
            case Audit():
                return self._on_audit(sender, message, now)
            case Abort():
                return self._on_abort(sender, message, now)
        return []  # an Ask about a lineage that is still open: the answer comes when it is not
