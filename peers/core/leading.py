"""What the leader of an attempt does: propose a plan, collect the members' votes, make the certificate or abort."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from peers.core.blame import Blame
from peers.core.effects import Send
from peers.core.group import Group, RoundContext
from peers.core.turn import Turn
from peers.protocol.certificates import Body, Certificate, Plan
from peers.protocol.messages import Abort, Decline, OddVote, Propose, Vote


class Failure(NamedTuple):
    """Why an attempt failed, and who is suspected (blame.py)."""

    reason: str
    suspects: Collection[str] = ()


class Lead:
    """One attempt that this peer leads. It is over when a method returns a Failure, or `certificate` is set."""

    def __init__(self, context: RoundContext, blame: Blame, plan: Plan, now: float) -> None:
        self._me, self._verify = context.keys.peer_id, context.verify
        self._swarm, self._timing, self._blame = context.swarm, context.timing, blame
        self.plan = plan
        self.certificate: Certificate | None = None
        """Set once all members have voted for the same result."""
        self.deadline = now + self._timing.attempt_s
        """When the attempt times out."""
        self.votes: dict[str, Vote] = {}

    def propose(self, turn: Turn, group: Collection[str]) -> None:
        for peer_id in sorted(group):
            if peer_id != self._me:
                turn.do(Send(peer_id, Propose(plan=self.plan)))

    def on_vote(self, turn: Turn, sender: str, vote: Vote) -> Failure | None:
        if vote.plan != self.plan.digest or sender not in self.plan.signer_set:
            return None
        body = Body(plan=self.plan, anchor=vote.anchor, momentum=vote.momentum)
        if sender != self._me and not self._verify(sender, body.signed_bytes, vote.signature):
            self._blame.strike(turn, sender, "it sends votes that are not signed")
            return self.abort(turn, f"a vote of {sender} is not signed by it", (sender,))
        self.votes[sender] = vote
        if self._has_majority:
            self.deadline = min(
                self.deadline, turn.now + self._timing.silence_s + 2 * self._timing.usual_round_s
            )
        return self._count_votes(turn) if len(self.votes) == len(self.plan.signers) else None

    @property
    def _has_majority(self) -> bool:
        """Most members have voted."""
        return 2 * len(self.votes) > len(self.plan.signers)

    def _count_votes(self, turn: Turn) -> Failure | None:
        """All members have voted: make the certificate, or abort if their digests differ."""
        digests = {(vote.anchor, vote.momentum) for vote in self.votes.values()}
        if len(digests) == 1:
            ((anchor, momentum),) = digests
            body = Body(plan=self.plan, anchor=anchor, momentum=momentum)
            signatures = tuple(self.votes[peer_id].signature for peer_id in self.plan.signers)
            self.certificate = Certificate(body=body, signatures=signatures)
            return None
        votes = tuple(
            OddVote(peer_id=peer_id, anchor=vote.anchor, momentum=vote.momentum, signature=vote.signature)
            for peer_id, vote in sorted(self.votes.items())
        )
        suspects = self._blame.suspect_by_digests(
            self.plan, {peer_id: (vote.anchor, vote.momentum) for peer_id, vote in self.votes.items()}
        )
        return self.abort(turn, "the digests of its members differ", suspects, votes)

    def on_decline(self, turn: Turn, sender: str, decline: Decline, group: Group) -> Failure | None:
        if decline.attempt != self.plan.attempt or sender not in self.plan.signer_set:
            return None
        reason = f"{sender} declines: {decline.reason}"
        blames_nobody = not decline.suspects and not decline.told_by
        if blames_nobody and group.removed_by(self.plan):
            return self.abort(turn, reason, ())
        return self.abort(turn, reason, (self._blame.for_decline(turn, self.plan, sender, decline),))

    def watch(self, turn: Turn) -> Failure | None:
        """Abort if a member is lost or votes are late."""
        not_voted = [
            peer_id for peer_id in self.plan.signers if peer_id not in self.votes and peer_id != self._me
        ]
        if lost := [peer_id for peer_id in not_voted if not self._swarm.is_live(peer_id)]:
            for peer_id in lost:
                self._blame.strike(turn, peer_id, "it was lost in the middle of a round", 0.5)
            return self.abort(turn, f"lost {', '.join(lost)}", lost)
        if not turn.passed(self.deadline):
            return None
        # If most members have not voted, the cause is probably not theirs: blame nobody.
        late = not_voted if self._has_majority else []
        for peer_id in late:
            self._blame.strike(turn, peer_id, "it does not vote")
        return self.abort(turn, f"no vote of {', '.join(not_voted)} in time", late)

    def abort(
        self, turn: Turn, reason: str, suspects: Collection[str], votes: Sequence[OddVote] = ()
    ) -> Failure:
        """Tell the members that this attempt has failed. `votes`: the proof, if their digests differ."""
        message = Abort(
            head=self.plan.parent,
            attempt=self.plan.attempt,
            reason=reason[:300],
            lost=tuple(sorted(suspects)),
            votes=tuple(votes),
        )
        for peer_id in self.plan.signers:
            if peer_id != self._me:
                turn.do(Send(peer_id, message))
        self._blame.for_digests(turn, self.plan, votes)
        return Failure(reason, suspects)
