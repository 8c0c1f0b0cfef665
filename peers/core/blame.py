"""Who is at fault for a failed attempt on one head, as far as this peer can tell.

Blame has two consequences. A *strike* counts against a peer's health (health.py), which leaves it out for some epochs
once it has several. A *suspect* is excluded from the next attempts on this head, if the others are enough (group.py).

Where the fault is proved, its author gets a whole strike. Where several peers may be at fault, or the network between
them, they share half a strike, and one of them, drawn by hash, is the suspect.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from peers.core.effects import Tell
from peers.core.events import ReduceFailed
from peers.core.group import RoundContext
from peers.core.health import FADE_EPOCHS
from peers.core.turn import Turn
from peers.protocol.certificates import Body, Certificate, Plan
from peers.protocol.messages import Abort, Decline, OddVote


class Blame:
    """For attempts at the commit that follows `parent`."""

    def __init__(self, context: RoundContext, parent: Certificate) -> None:
        self._me, self._verify = context.keys.peer_id, context.verify
        self._swarm, self._timing = context.swarm, context.timing
        self._head, self._epoch = parent.head, parent.plan.epoch
        self.suspects: frozenset[str] = frozenset()
        """Of all failed attempts on this head."""
        self.last_suspects: frozenset[str] = frozenset()
        """Of the last failed attempt."""
        self.is_outlier = False
        """This peer's digests differed from the majority's: its state may be damaged."""

    def attempt_failed(self, suspects: Collection[str]) -> None:
        self.last_suspects = frozenset(suspects) - {self._me}
        self.suspects |= self.last_suspects

    def strike(self, turn: Turn, peer_id: str, why: str, weight: float = 1.0) -> None:
        if self._swarm.strike(peer_id, self._epoch, weight):
            status = self._swarm.status(peer_id)
            rank, term = status.world_rank if status else -1, self._swarm.term(peer_id)
            turn.do(
                Tell(
                    "left_out",
                    f"peer {rank} ({peer_id}) is left out of the next {term} epochs, if the others are enough; its "
                    f"last fault: {why}",
                )
            )

    def for_decline(self, turn: Turn, plan: Plan, sender: str, decline: Decline) -> str:
        """A member declines the plan that this peer has proposed, or reports that its reduction failed. Returns the
        suspect."""
        # The fault may lie with the sender, with a member that it names, or with the link between them: the sender and
        # those it names share the blame.
        named = sorted(({*decline.suspects, *decline.told_by} & plan.signer_set) - {sender, self._me})
        self.strike(turn, sender, decline.reason, 0.5)
        for peer_id in named:
            self.strike(turn, peer_id, decline.reason, 0.5 / len(named))
        # Suspects that have missed half of the heartbeats after which they count as lost are likely to be at fault.
        # All of them must have: naming everybody is no way to put the blame on whoever is slow.
        suspects = [peer_id for peer_id in named if peer_id in decline.suspects]
        silence_s = self._timing.silence_s / 2
        are_silent = [self._swarm.is_silent_for(peer_id, silence_s, turn.now) for peer_id in suspects]
        return suspects[0] if suspects and all(are_silent) else self._drawn(plan.attempt, [sender, *named])

    def for_failed_reduction(self, turn: Turn, plan: Plan, failed: ReduceFailed) -> frozenset[str]:
        """This peer's own reduction has failed. Returns the suspects."""
        for peer_id in sorted(failed.offenders):
            self.strike(turn, peer_id, failed.reason)
        # Under hearsay the accuser may itself be at fault, so accuser and accused share half a strike.
        possible_culprits = (failed.suspects - failed.offenders) | (failed.told_by - {self._me})
        weight = 0.5 / len(possible_culprits) if failed.told_by and possible_culprits else 0.5
        for peer_id in sorted(possible_culprits):
            self.strike(turn, peer_id, failed.reason, weight)
        if failed.told_by and (named := (failed.suspects | failed.told_by) - {self._me}):
            return frozenset({self._drawn(plan.attempt, named)})
        return failed.suspects

    def for_abort(self, turn: Turn, leader: str, abort: Abort, num_leaders: int) -> None:
        """The leader has given its attempt up."""
        # A leader's turn comes once in as many epochs as there are members. At this weight, strikes fade twice as fast
        # as one leader can add them: no single leader can exclude a peer.
        weight = min(0.5, num_leaders / (2 * FADE_EPOCHS))
        for peer_id in sorted(set(abort.lost) - {self._me, leader}):
            if self._swarm.is_live(peer_id):
                self.strike(turn, peer_id, abort.reason, weight)

    def for_digests(self, turn: Turn, plan: Plan, votes: Sequence[OddVote]) -> None:
        """The members' signed votes differ: strike those that differ from the majority."""
        proven = [
            vote
            for vote in votes
            if vote.peer_id in plan.signers
            and self._verify(
                vote.peer_id,
                Body(plan=plan, anchor=vote.anchor, momentum=vote.momentum).signed_bytes,
                vote.signature,
            )
        ]
        voted = {vote.peer_id: (vote.anchor, vote.momentum) for vote in proven}
        if len(voted) < len(plan.signers) or len(proven) > len(voted) or len(set(voted.values())) < 2:
            # A vote is missing, doubled or not valid: this proves nothing.
            return
        outliers, has_majority = _outliers(voted)
        self.is_outlier = self.is_outlier or self._me in outliers
        # A single outlier counts as the cause, although another member may have sent wrong sums to it alone: the votes
        # do not tell (docs/tutorials/security.md). Several outliers may have been sent wrong sums by one of them.
        weight = 1.0 if has_majority and len(outliers) == 1 else 0.5 / len(outliers)
        for peer_id in sorted(outliers - {self._me}):
            self.strike(turn, peer_id, "its digests differ from the others'", weight)

    def suspect_by_digests(self, plan: Plan, voted: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
        """The suspect among members whose digests (anchor, momentum) differ from the majority's, if there is one."""
        outliers, _ = _outliers(voted)
        others = outliers - {self._me}
        return (self._drawn(plan.attempt, others),) if others else ()

    def _drawn(self, attempt: int, peer_ids: Iterable[str]) -> str:
        """One of these, by hash, so that it changes with head and attempt."""
        return min(peer_ids, key=lambda p: hashlib.sha256(f"{self._head} {attempt} {p}".encode()).digest())


def _outliers(voted: Mapping[str, tuple[str, str]]) -> tuple[set[str], bool]:
    """The peers whose digests differ from the majority's, and True; without a majority all peers, and False."""
    most_common, count = Counter(voted.values()).most_common(1)[0]
    if 2 * count <= len(voted):
        return set(voted), False
    return {peer_id for peer_id, digests in voted.items() if digests != most_common}, True
