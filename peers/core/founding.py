"""How a run begins: the founders sign a genesis, which names the first roster and the state that all start from."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.core.effects import Pledge, Send
from peers.core.health import Swarm
from peers.core.settings import Settings
from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.protocol.certificates import Body, Certificate, Keys, Member, Plan, Signature, Verify
from peers.protocol.messages import Found, Offer, Vote

NO_HEAD = ""


@dataclass
class Founding:
    """This peer's part in it. Founders are live peers that offer a state, and none has a head."""

    keys: Keys
    verify: Verify
    settings: Settings
    timing: Timing
    swarm: Swarm
    began_at: float
    signed: int = -1
    """The last attempt that this peer has signed, in an earlier life too."""
    attempt: int = 0
    certificate: Certificate | None = None
    """The genesis, if this peer led to it."""
    _body: Body | None = None
    """That this peer has proposed, and the signatures under it."""
    _signatures: dict[str, Signature] = field(default_factory=dict)
    _signed_at: float = 0.0
    _could_at: float | None = None

    def __post_init__(self) -> None:
        self.attempt = self.signed + 1

    def founders(self, world_rank: int, offer: Offer) -> dict[str, tuple[int, Offer]]:
        """By peer id, with the world ranks that they claim."""
        others = {
            peer_id: (status.world_rank, status.offer)
            for peer_id, status in self.swarm.live()
            if status.offer is not None and not status.head
        }
        return others | {self.keys.peer_id: (world_rank, offer)}

    def is_complete(self, turn: Turn, num_founders: int) -> bool:
        return num_founders >= self.settings.galaxy_size or turn.passed(
            self.began_at + self.settings.founders_timeout_s
        )

    def advance(self, turn: Turn, world_rank: int, offer: Offer) -> bool:
        """True if anything was due."""
        founders = self.founders(world_rank, offer)
        if any(status.head for _, status in self.swarm.live()) or not self.is_complete(turn, len(founders)):
            self._could_at = None
            return False
        self._could_at = turn.now if self._could_at is None else self._could_at
        leader = self._leader(founders)
        # Each attempt is given time for statuses to agree on who is there, and for an answer.
        if turn.passed(self._could_at + 2 * self.timing.reaction_s):
            self.attempt, self._could_at, self._body = self.attempt + 1, turn.now, None
            return True
        if leader != self.keys.peer_id or self._body is not None or self.attempt <= self.signed:
            return False
        self._propose(turn, founders)
        return True

    def _leader(self, founders: Mapping[str, object]) -> str:
        order = sorted(
            founders, key=lambda p: hashlib.sha256(f"{self.settings.manifest} {p}".encode()).digest()
        )
        return order[self.attempt % len(order)]

    def _propose(self, turn: Turn, founders: Mapping[str, tuple[int, Offer]]) -> None:
        body = self._body = genesis_of(self.settings, founders, self.attempt)
        self._signatures = {}
        self._sign(turn, body)
        for peer_id in founders:
            if peer_id != self.keys.peer_id:
                turn.do(Send(peer_id, Found(body=body)))

    def on_found(self, turn: Turn, sender: str, body: Body, world_rank: int, offer: Offer) -> None:
        """Sign it, if it is what this peer would propose of these founders."""
        founders = self.founders(world_rank, offer)
        named = {member.peer_id for member in body.plan.roster}
        if sender not in named or self.keys.peer_id not in named or not named <= founders.keys():
            return
        attempt = body.plan.attempt
        if attempt <= self.signed or attempt > self.attempt + len(founders):
            return
        if not self.is_complete(turn, len(named)):
            return
        if body != genesis_of(self.settings, {p: founders[p] for p in named}, attempt):
            return
        self.attempt, self._body, self._could_at = attempt, None, turn.now
        self._sign(turn, body, sender)

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


def genesis_of(settings: Settings, founders: Mapping[str, tuple[int, Offer]], attempt: int) -> Body:
    """The state that is furthest trained, of equals that which most offer, then the smaller digest."""
    offers = Counter(offer for _, offer in founders.values())
    best = min(
        offers, key=lambda offer: (-offer.epoch, -offers[offer], offer.anchor, offer.momentum, offer.parent)
    )
    ranks: dict[str, int] = {}
    for peer_id in sorted(founders, key=lambda p: (founders[p][0] < 0, founders[p][0], p)):
        claimed = founders[peer_id][0]
        taken = set(ranks.values())
        free = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        ranks[peer_id] = claimed if claimed >= 0 and claimed not in taken else free
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
        data_base=best.data_base,
        tokens=best.tokens,
    )
    return Body(plan=plan, anchor=best.anchor, momentum=best.momentum)
