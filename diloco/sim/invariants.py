"""The invariants: what must hold after every event, under any faults. The first violation ends the run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from diloco.sim.clock import Clock
from diloco.sim.truth import Split, Truth, split_between
from diloco.sim.values import Pieces, State, fragment_of
from peers.core.effects import Answer
from peers.core.settings import Settings
from peers.protocol.aggregation import ROBUST_RULES
from peers.protocol.certificates import Certificate, Plan, Verify
from peers.protocol.messages import Certificates, Message, Vote

if TYPE_CHECKING:
    from diloco.sim.peer import VirtualPeer

LEAST_OUTAGE_S = 2.0
"""A newcomer that could not hear a peer for this long may have decided without it."""
SLACK_S = 3.0
"""An outage that ended less than this ago still has effects: channels have to reopen, statuses come at heartbeats."""
GONE_S = 12.0 - SLACK_S
"""A minority may do without a member that was lost for 12 s. It is lost as soon as its channel breaks."""
OFF_HEAD_S = 15.0 - SLACK_S
"""A minority may also do without a member that was not on the head for 15 s."""
TELL_S = 1.0
"""A peer needs at most this long to tell the others that it has reached a head."""
GENESIS = ""
"""The head on which a genesis is signed."""


class InvariantViolated(AssertionError):
    pass


class Invariants:
    """To be asked about honest peers only; `liars` may do anything. `peers`: the live ones, by peer id."""

    def __init__(
        self,
        clock: Clock,
        truth: Truth,
        verify: Verify,
        liars: Collection[str],
        peers: Mapping[str, VirtualPeer],
        settings: Settings,
    ) -> None:
        self._peers, self._settings = peers, settings
        self._clock, self._truth, self._verify, self._liars = clock, truth, verify, frozenset(liars)
        self._least_group = 3 if settings.aggregation.rule in ROBUST_RULES else 1
        self._signed: dict[tuple[str, str, int], tuple[str, str, str]] = {}
        self._began_to_reduce: dict[str, float] = {}
        """By peer id: when its last reduction began."""
        self._seen: set[tuple[str, str]] = set()

    def violated(self, text: str) -> None:
        raise InvariantViolated(f"at {self._clock.now:.3f} s: {text}")

    # No honest peer signs twice

    def sends(self, peer: VirtualPeer, message: Message) -> None:
        if isinstance(message, Vote):
            digests = (message.plan, message.anchor, message.momentum)
            self._signs(peer, message.head, message.attempt, digests)
            if peer.pledges.get(message.head, -1) < message.attempt:
                self.violated(f"{peer.peer_id} votes without having pledged")
        elif isinstance(message, Certificates):
            self._truth.knows(message.certificates)
            for certificate in message.certificates:
                if (
                    peer.peer_id in certificate.plan.signers
                    and (peer.peer_id, certificate.head) not in self._seen
                ):
                    self._seen.add((peer.peer_id, certificate.head))
                    plan, body = certificate.plan, certificate.body
                    head = GENESIS if certificate.is_genesis else plan.parent
                    self._signs(peer, head, plan.attempt, (plan.digest, body.anchor, body.momentum))

    def _signs(self, peer: VirtualPeer, head: str, attempt: int, digests: tuple[str, str, str]) -> None:
        if self._signed.setdefault((peer.peer_id, head, attempt), digests) != digests:
            self.violated(f"{peer.peer_id} signs twice at attempt {attempt} on {head[:6]}")

    # Epoch, state and head move together

    def after_event(self, peer: VirtualPeer) -> None:
        machine, state = peer.machine, peer.state
        told = (machine.head, machine.epoch, machine.certificate.head if machine.certificate else "")
        held = (state.head, state.epoch, state.head) if state is not None else ("", 0, "")
        if told != held:
            self.violated(f"{peer.peer_id} holds {held} and says {told}")
        if self._truth.contradictions:
            self.violated(f"two peers have different values of head {self._truth.contradictions[0][:6]}")

    # What is reduced, committed and told to workers

    def begins_to_reduce(self, peer: VirtualPeer, plan: Plan) -> None:
        self._began_to_reduce[peer.peer_id] = self._clock.now
        head = peer.state.head if peer.state is not None else ""
        if plan.parent != head:
            self.violated(f"{peer.peer_id} at {head[:6]} reduces on {plan.parent[:6]}")
        if peer.in_hand is None:
            self.violated(f"{peer.peer_id} has nothing to reduce")
        elif peer.in_hand.base != head:
            self.violated(f"{peer.peer_id} reduces work based on {peer.in_hand.base[:6]} at {head[:6]}")
        elif any(fragment_of(p, self._settings.num_fragments) != plan.fragment for p in peer.in_hand.pieces):
            self.violated(f"{peer.peer_id} reduces work on another fragment than {plan.fragment}")

    def applies(self, peer: VirtualPeer, certificate: Certificate) -> None:
        outcome, body, me = peer.outcome, certificate.body, peer.peer_id
        if outcome is None or outcome.plan != body.plan:
            self.violated(f"{me} applies {certificate.head[:6]} without its result")
        elif (outcome.anchor, outcome.momentum) != (body.anchor, body.momentum):
            self.violated(f"{me} applies {certificate.head[:6]} with other digests")
        elif peer.state is None or peer.state.head != body.plan.parent:
            self.violated(f"{me} applies {certificate.head[:6]} to another state")
        elif doubled := outcome.doubled - self._truth.may_count_twice:
            self.violated(f"{me} commits pieces {sorted(doubled)} that are in the state twice")
        self._check_signatures(me, certificate)
        if len(body.plan.contributors) < self._least_group:
            self.violated(f"{me} commits {certificate.head[:6]} with fewer than {self._least_group} members")
        given = [contributor.weight for contributor in body.plan.contributors]
        if peer.state is not None and peer.state.certificate is not None:
            fair = fair_weights(body.plan, peer.state.certificate.plan, self._settings)
            if not all(map(math.isclose, given, fair)):
                self.violated(f"{me} commits {certificate.head[:6]} with the weights {given}, not {fair}")
        if not self._has_more_than(self._settings.quorum, certificate) and (
            others := self._who_takes_part(me, certificate)
        ):
            self.violated(f"{me} commits {certificate.head[:6]} by a minority, though it hears {others}")

    def rebases(self, peer: VirtualPeer) -> None:
        self._check_work_is_not_in(peer, "rebases")

    def answers(self, peer: VirtualPeer, answer: Answer) -> None:
        state, handed, me = peer.state, peer.in_hand, peer.peer_id
        if answer.how != "keep" and (state is None or state.epoch != answer.epoch):
            self.violated(f"{me} answers {answer.how} for epoch {answer.epoch}, and is elsewhere")
        if answer.how != "begin" and handed is None:
            self.violated(f"{me} answers {answer.how}, and nobody has handed over anything")
        if answer.how == "rebase":
            self._check_work_is_not_in(peer, "answers that it is to be rebased")
            self._truth.may_count_twice |= self._committed_elsewhere(peer)
        if answer.how == "contributed" and handed is not None and state is not None:
            self._check_work_is_in(me, handed.pieces, state)

    def _check_work_is_in(self, me: str, pieces: Pieces, state: State) -> None:
        if missing := sorted(pieces - state.pieces):
            self.violated(f"{me} tells its worker that its work is in {state.head[:6]}: {missing} are not")

    def _check_work_is_not_in(self, peer: VirtualPeer, what: str) -> None:
        if peer.in_hand is None or peer.state is None:
            return
        if twice := sorted(peer.in_hand.pieces & peer.state.pieces - self._truth.may_count_twice):
            self.violated(f"{peer.peer_id} {what}: {twice} are in {peer.state.head[:6]} already")

    def _committed_elsewhere(self, peer: VirtualPeer) -> Pieces:
        """What of the work in hand is in commits on another side of a fork than the peer's own. It has voted for them
        without seeing them. If that side wins later, the work counts twice (late_work.py)."""
        state, handed = peer.state, peer.in_hand
        if state is None or handed is None:
            return frozenset()
        others = (other for other in self._truth.states.values() if not state.leads_to(other))
        return handed.pieces & frozenset().union(*(other.pieces for other in others))

    # Whose state is adopted

    def adopts(self, peer: VirtualPeer, certificate: Certificate) -> None:
        me, state = peer.peer_id, peer.fetched_state
        self._check_signatures(me, certificate)
        if state is None or state.head != certificate.head:
            return
        split = split_between(peer.state, state) if peer.state is not None else None
        if split is None or split.ancestor is None:
            self._check_is_known(peer, certificate.head)
            self._check_gives_way(peer, certificate.head)
        elif not split.ours:
            for theirs in split.theirs:
                self._check_support(peer, self._truth.certificates[theirs.head])
        elif not split.theirs:
            self._check_rollback(me, split, certificate.head)
        elif not self._truth.fork_rule_allows(
            split, lambda p: p in (me, *self._peers) and not self._is_excused(me, p, LEAST_OUTAGE_S)
        ):
            self.violated(
                f"{me} leaves {split.ours[-1].head[:6]} for {certificate.head[:6]} against the Fork rule"
            )

    def _check_rollback(self, me: str, split: Split, head: str) -> None:
        """A majority of the roster stayed at the earlier head, and no majority has signed what came after it."""
        roster, since = self._truth.roster_after(head), self._truth.held_since[me] - SLACK_S
        stayed = {
            p for p in roster if p in self._liars or self._truth.was_on_head(p, head, since, self._clock.now)
        }
        signed = {
            p
            for state in split.ours
            for p in self._truth.certificates[state.head].plan.signers
            if p in roster
        }
        if 2 * len(stayed) <= len(roster) or 2 * len(signed) > len(roster):
            self.violated(
                f"{me} goes back to {head[:6]}, where {sorted(stayed)} of {sorted(roster)} stayed, from what "
                f"{sorted(signed)} have signed"
            )

    def _check_is_known(self, peer: VirtualPeer, head: str) -> None:
        """A newcomer adopts only states of honest peers, as long as it hears more of them than there are liars."""
        if head in self._truth.held_by_honest:
            return
        me = peer.peer_id
        others = [
            p for p, other in self._peers.items() if p != me and other.is_honest and other.state is not None
        ]
        heard = [
            p
            for p in others
            if not self._is_excused(me, p, LEAST_OUTAGE_S)
            and self._has_honest_majority(self._truth.head_of.get(p, ""))
        ]
        if len(heard) > len(self._liars):
            self.violated(
                f"{peer.peer_id} adopts {head[:6]}, which no honest peer has held, though it hears {heard}"
            )

    def _has_honest_majority(self, head: str) -> bool:
        """Otherwise liars may continue from this head as they like."""
        roster = self._truth.roster_after(head) if head else frozenset[str]()
        return 2 * len(roster - self._liars) > len(roster)

    def _check_gives_way(self, peer: VirtualPeer, head: str) -> None:
        """Commits are not given up for another run as long as this peer hears a majority of its roster at its head."""
        me, own = peer.peer_id, peer.state
        if own is None or own.certificate is None or own.certificate.is_genesis:
            return
        roster, now = self._truth.roster_after(own.head), self._clock.now
        stayed = [
            p
            for p in sorted(roster - self._liars - {me})
            if self._truth.was_on_head(p, own.head, now, now - SLACK_S)
            and not self._is_excused(me, p, LEAST_OUTAGE_S)
        ]
        if stayed and 2 * len({me, *stayed}) > len(roster):
            self.violated(f"{me} leaves {own.head[:6]}, where {stayed} are, for {head[:6]} of another run")

    def _check_support(self, peer: VirtualPeer, certificate: Certificate) -> None:
        """A majority of the roster before the certificate has signed it, or no fewer members than could object."""
        me, before = peer.peer_id, certificate.plan.parent
        if self._has_more_than(0.5, certificate):
            return
        objectors = [
            p
            for p in self._reachable(me, certificate)
            if self._truth.was_on_head(p, before, self._clock.now - LEAST_OUTAGE_S, self._clock.now)
        ]
        signers = self._truth.roster_after(before).intersection(certificate.plan.signers)
        if len(signers) < len(objectors):
            self.violated(
                f"{me} adopts {certificate.head[:6]}, signed by {sorted(signers)}, though it hears {objectors}"
            )

    def _has_more_than(self, share: float, certificate: Certificate) -> bool:
        """Whether more than this share of the roster before the certificate has signed it."""
        if certificate.is_genesis:
            return True
        roster = self._truth.roster_after(certificate.plan.parent)
        return len(roster.intersection(certificate.plan.signers)) > share * len(roster)

    def _who_takes_part(self, me: str, certificate: Certificate) -> list[str]:
        """Honest roster members that have not signed, and that this peer should have waited for.

        Not members that were on another head, were fetching a state, or had no worker.
        """
        plan = certificate.plan
        formed_at = self._began_to_reduce[me]
        had_worker_since = self._truth.held_since.get(me, 0.0) - SLACK_S
        return [
            p
            for p in self._reachable(me, certificate)
            if self._was_seen_on_head(me, p, plan.parent, formed_at)
            and self._truth.idle_until.get(p, -math.inf) < had_worker_since
        ]

    def _was_seen_on_head(self, me: str, p: str, head: str, now: float) -> bool:
        """Whether p took part on this head in the last OFF_HEAD_S, and could tell this peer before an outage between
        them."""
        told_by = min(now, self._truth.outages.since(me, p, now - SLACK_S)) - TELL_S
        return self._truth.took_part(p, head, now - OFF_HEAD_S, told_by)

    def _reachable(self, me: str, certificate: Certificate) -> list[str]:
        """Honest roster members that have not signed, and that this peer could hear without a long outage."""
        absent = self._truth.roster_after(certificate.plan.parent) - {me, *certificate.plan.signers}
        return [p for p in sorted(absent - self._liars) if not self._is_excused(me, p, GONE_S)]

    def _is_excused(self, me: str, other: str, outage_s: float) -> bool:
        since = self._truth.held_since.get(me, 0.0) - SLACK_S
        if self._truth.left_until.get(other, -math.inf) >= since:
            return True
        return self._truth.outages.longest_s(me, other, since, self._clock.now) >= outage_s

    def _check_signatures(self, me: str, certificate: Certificate) -> None:
        if not certificate.is_signed(self._verify):
            self.violated(f"{me} goes to {certificate.head[:6]}, which not all of its members have signed")


def fair_weights(plan: Plan, before: Plan, settings: Settings) -> list[float]:
    """The weights of a plan's contributions by what --hv.aggregation, --hv.max-weight and --hv.staleness-discount say.
    `before`: the plan that it follows.

    Independent of peers/core/weights.py: an invariant must not share a bug with the code that it checks.
    """
    shares = _fair_shares(plan, settings)
    works = [contributor.work for contributor in plan.contributors]
    if settings.aggregation.rule != "clip" or max(len(works), len(before.roster)) < 3:
        return shares
    longest = 4 * sorted(work.norm for work in works)[(len(works) - 1) // 2]
    lengths = {
        c.peer_id: c.work.norm * c.weight / share
        for c, share in zip(before.contributors, _fair_shares(before, settings), strict=True)
        if share and len(works) < 3
    }
    return [
        share * min(1.0, max(longest, lengths.get(c.peer_id, 0.0)) / (c.work.norm or 1.0))
        for c, share in zip(plan.contributors, shares, strict=True)
    ]


def _fair_shares(plan: Plan, settings: Settings) -> list[float]:
    rule, works = settings.aggregation, [contributor.work for contributor in plan.contributors]
    if not works:
        return []
    if rule.rule in ROBUST_RULES:
        return [1 / len(works)] * len(works)
    tokens = []
    for work in works:
        late = plan.epoch - work.based_on
        most = rule.max_tokens_per_epoch * late if rule.rule == "clip" else 0
        counted = min(work.tokens, most) if most else work.tokens
        tokens.append(counted * rule.staleness_discount ** max(0, late - settings.num_fragments))
    middle = (len(works) - 1) // 2
    if rule.rule == "clip" and (most_tokens := rule.max_weight * sorted(tokens)[middle]):
        tokens = [min(each, most_tokens) for each in tokens]
    return [each / sum(tokens) if any(tokens) else 1 / len(works) for each in tokens]
