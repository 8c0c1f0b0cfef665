"""How a run begins: all founders sign a genesis, which names the first roster and the state that they start from.

As in a round (round.py), attempts are led by the founders in turn. The leader proposes a genesis, and every founder
signs it if it would have proposed the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from peers.core.effects import Pledge, Send
from peers.core.health import Swarm
from peers.core.plans import is_free, lowest_free
from peers.core.settings import Settings
from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.protocol.certificates import Body, Certificate, Keys, Member, Plan, Signature, Verify
from peers.protocol.limits import MAX_ATTEMPT, MAX_EPOCH
from peers.protocol.messages import Found, Offer, Vote

NO_HEAD = ""


@dataclass
class Founding:
    """This peer's part in founding a run. Founders are live peers that offer a state and have no head yet."""

    keys: Keys
    verify: Verify
    settings: Settings
    timing: Timing
    swarm: Swarm
    began_at: float
    signed: int = -1
    """The last attempt that this peer has signed, also before a restart; -1: none."""
    attempt: int = 0
    not_before: float = -math.inf
    """Found no run before this time: a peer has announced an existing one, whose certificates may still arrive."""
    certificate: Certificate | None = None
    """The genesis, set when an attempt that this peer led has succeeded."""
    _body: Body | None = None
    """What this peer has proposed in this attempt."""
    _signatures: dict[str, Signature] = field(default_factory=dict)
    """The signatures under `_body` so far, by founder."""
    _followed_at: float = -math.inf
    """When this peer last skipped to the attempt that most founders have reached."""
    _attempt_since: float | None = None
    """Since when the founders have been complete and this attempt has run; starts its timeout."""
    _unwilling: set[str] = field(default_factory=set)
    """Founders that did not sign what this peer proposed."""
    _proposals: dict[str, Body] = field(default_factory=dict)
    """The last proposal of each other founder. It may arrive before the statuses that it was made from."""

    def __post_init__(self) -> None:
        self.attempt = min(MAX_ATTEMPT, self.signed + 1)

    @property
    def heard_by(self) -> float:
        """Until then founding waits for first statuses of connected peers, no longer: strangers may keep coming."""
        return self.began_at + self.timing.last_resort_s

    def heard_of_a_run(self, now: float) -> None:
        """A peer announces a head: delay the founding. Only once, so that peers which announce runs that do not exist
        cannot delay it for ever."""
        if math.isinf(self.not_before):
            self.not_before = now + 4 * self.timing.reaction_s

    def founders(self, world_rank: int, offer: Offer) -> dict[str, tuple[int, Offer]]:
        """By peer id, the world rank that each founder claims and the state that it offers."""
        others = {
            peer_id: (status.world_rank, status.offer)
            for peer_id, status in self.swarm.live()
            if status.offer is not None and not status.head
        }
        return others | {self.keys.peer_id: (world_rank, offer)}

    def is_complete(self, turn: Turn, num_founders: int) -> bool:
        """Whether enough founders are here, or the time to wait for more has passed."""
        return num_founders >= self.settings.galaxy_size or turn.passed(
            self.began_at + self.settings.founders_timeout_s
        )

    def advance(self, turn: Turn, world_rank: int, offer: Offer) -> bool:
        """Do what is due; True if anything was."""
        founders = self.founders(world_rank, offer)
        if not self.is_complete(turn, len(founders)):
            self._attempt_since = None
            return False
        self._proposals = {p: body for p, body in self._proposals.items() if p in founders}
        if any(self._answer(turn, sender, body, founders) for sender, body in self._proposals.items()):
            return True
        self._attempt_since = turn.now if self._attempt_since is None else self._attempt_since
        if self._follow_majority(turn, founders):
            return True
        # An attempt gets one reaction time for statuses to agree on who the founders are, and one for the answers.
        is_ahead = self.attempt > self._majority_attempt(founders)
        if not is_ahead and turn.passed(self._attempt_since + 2 * self.timing.reaction_s):
            self._enter_attempt(turn, self.attempt + 1)
            return True
        chosen = self._chosen(turn, founders)
        is_mine = _leader(self.settings.manifest, chosen, self.attempt) == self.keys.peer_id
        if not is_mine or self._body is not None or self.attempt <= self.signed:
            return False
        self._propose(turn, chosen)
        return True

    def _majority_attempt(self, founders: Iterable[str]) -> int:
        """The highest attempt that a majority of the founders has reached."""
        statuses = [self.swarm.status(peer_id) for peer_id in founders if peer_id != self.keys.peer_id]
        attempts = sorted([self.attempt, *(status.attempt for status in statuses if status is not None)])
        return attempts[(len(attempts) - 1) // 2]

    def _follow_majority(self, turn: Turn, founders: Collection[str]) -> bool:
        # Bounded steps, as in a round.
        most_reached = min(self._majority_attempt(founders), self.attempt + 2 * len(founders))
        if most_reached <= self.attempt or not turn.passed(self._followed_at + self.timing.reaction_s):
            return False
        self._followed_at = turn.now
        self._enter_attempt(turn, most_reached)
        return True

    def _enter_attempt(self, turn: Turn, attempt: int) -> None:
        if self._body is not None:
            # These founders were live and did not sign this peer's proposal.
            self._unwilling |= set(self._body.plan.signers) - self._signatures.keys()
        self.attempt, self._attempt_since, self._body = min(attempt, MAX_ATTEMPT), turn.now, None

    def _chosen(self, turn: Turn, founders: Mapping[str, tuple[int, Offer]]) -> dict[str, tuple[int, Offer]]:
        """The founders to propose: without the unwilling ones, if the others are enough (`is_complete`)."""
        willing = {p: founder for p, founder in founders.items() if p not in self._unwilling}
        return willing if self.is_complete(turn, len(willing)) else dict(founders)

    def _propose(self, turn: Turn, founders: Mapping[str, tuple[int, Offer]]) -> None:
        body = self._body = genesis_of(self.settings, founders, self.attempt)
        self._signatures = {}
        self._sign(turn, body)
        for peer_id in founders:
            if peer_id != self.keys.peer_id:
                turn.do(Send(peer_id, Found(body=body)))

    def on_found(self, sender: str, body: Body) -> None:
        status = self.swarm.status(sender)
        if status is not None and status.offer is not None:
            self._proposals[sender] = body

    def _answer(self, turn: Turn, sender: str, body: Body, founders: Mapping[str, tuple[int, Offer]]) -> bool:
        """Sign this proposal if it is the sender's turn and this peer would propose the same. True if signed."""
        attempt = body.plan.attempt
        if not self.signed < attempt or not self.attempt <= attempt <= self.attempt + 1:
            return False
        named = {p: founders[p] for p in (member.peer_id for member in body.plan.roster) if p in founders}
        if len(named) != len(body.plan.roster) or self.keys.peer_id not in named:
            return False
        if _leader(self.settings.manifest, named, attempt) != sender or not self.is_complete(
            turn, len(named)
        ):
            return False
        if body != genesis_of(self.settings, named, attempt):
            return False
        self._enter_attempt(turn, attempt)
        self._sign(turn, body, sender)
        return True

    def on_vote(self, sender: str, vote: Vote) -> None:
        body = self._body
        if body is None or vote.plan != body.plan.digest or sender not in body.plan.signers:
            return
        if self.verify(sender, body.signed_bytes, vote.signature):
            self._signatures[sender] = vote.signature
            self._complete(body)

    def _sign(self, turn: Turn, body: Body, leader: str = "") -> None:
        self.signed = body.plan.attempt
        turn.do(Pledge(NO_HEAD, body.plan.attempt))
        signature = self.keys.sign(body.signed_bytes)
        if not leader:
            self._signatures[self.keys.peer_id] = signature
            self._complete(body)
            return
        vote = Vote(
            head=NO_HEAD,
            attempt=body.plan.attempt,
            plan=body.plan.digest,
            anchor=body.anchor,
            momentum=body.momentum,
            signature=signature,
        )
        turn.do(Send(leader, vote))

    def _complete(self, body: Body) -> None:
        if len(self._signatures) == len(body.plan.signers):
            signatures = tuple(self._signatures[peer_id] for peer_id in body.plan.signers)
            self.certificate = Certificate(body=body, signatures=signatures)


def _leader(manifest: str, founders: Iterable[str], attempt: int) -> str:
    order = sorted(founders, key=lambda peer_id: hashlib.sha256(f"{manifest} {peer_id}".encode()).digest())
    return order[attempt % len(order)]


def genesis_of(settings: Settings, founders: Mapping[str, tuple[int, Offer]], attempt: int) -> Body:
    """The genesis of these founders. Of the states that they offer it takes a trained one before an untrained one, then
    the one that most founders offer or have signed, then the later epoch, then the smaller digest."""
    offers = {offer for _, offer in founders.values()}

    def rank(offer: Offer) -> tuple[bool, int, int, str, str]:
        known_to = {peer_id for peer_id, (_, other) in founders.items() if other == offer}
        if offer.certificate is not None:
            known_to |= founders.keys() & set(offer.certificate.plan.signers)
        return offer.certificate is None, -len(known_to), -offer.epoch, offer.anchor, offer.momentum

    best = min(offers, key=rank)
    before = best.certificate.plan if best.certificate is not None else None
    ranks: dict[str, int] = {}
    for peer_id in sorted(founders, key=lambda p: (founders[p][0] < 0, founders[p][0], p)):
        claimed = founders[peer_id][0]
        taken = set(ranks.values())
        ranks[peer_id] = claimed if is_free(claimed, taken) else lowest_free(taken)
    roster = tuple(
        Member(peer_id=p, world_rank=rank) for p, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    plan = Plan(
        manifest=settings.manifest,
        parent=best.parent,
        epoch=best.epoch,
        fragment=0,
        attempt=attempt,
        contributors=(),
        roster=roster,
        data_base=before.data_base if before else 0,
        tokens=before.tokens if before else 0,
    )
    return Body(plan=plan, anchor=best.anchor, momentum=best.momentum)


def is_offer_sound(offer: Offer, verify: Verify) -> bool:
    """Whether an offered state, unless it is untrained, comes with a valid certificate of its last commit."""
    certificate = offer.certificate
    if certificate is None:
        return True
    is_its_own = (certificate.body.anchor, certificate.body.momentum) == (offer.anchor, offer.momentum)
    return is_its_own and certificate.plan.epoch <= MAX_EPOCH and certificate.is_signed(verify)
