"""Byzantine members that make plans and certificates no honest peer would: wrong groups, and made-up commits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from diloco.sim.liars import Liar, MakeLiar
from diloco.sim.values import State, digest
from peers.core import effects, events
from peers.core.effects import Broadcast, Effect, Send
from peers.core.events import Event
from peers.core.plans import Entry, plan_of
from peers.protocol.certificates import Body, Certificate, Member, Plan, Signature, Work
from peers.protocol.limits import MAX_CERTIFICATES, MAX_COUNT, MAX_TOKENS
from peers.protocol.messages import Ask, Certificates, Propose, Status, Vote

LONG_CHAIN = 8

Twist = Callable[[str, Plan], Plan]
"""(liar, honest plan) -> the plan that the liar proposes instead."""


@dataclass(kw_only=True)
class RogueLeader(Liar):
    """Proposes plans that break the rules, reduces them with the members that accept, and publishes the certificate."""

    twist: Twist
    _plans: dict[str, Plan] = field(default_factory=dict)
    """The plan it proposed, by the digest of the honest plan that its Peer made."""
    _signatures: dict[tuple[str, str, str], dict[str, Signature]] = field(default_factory=dict)

    def say(self, effect: Effect) -> Iterable[Effect]:
        match effect:
            case Send(peer_id, Propose(plan)):
                twisted = self._plans.setdefault(plan.digest, self.twist(self.me, plan))
                return (Send(peer_id, Propose(plan=twisted)),) if peer_id in twisted.signers else ()
            case effects.Reduce(plan, timeout_s) if plan.digest in self._plans:
                return (effects.Reduce(self._plans[plan.digest], timeout_s),)
        return (effect,)

    def answer(self, event: Event | None) -> Iterable[Effect]:
        match event:
            case events.Received(sender, Vote() as vote):
                return self._count(vote.plan, vote.anchor, vote.momentum, sender, vote.signature)
            case events.Reduced(plan_digest, anchor, momentum):
                plan = self._plan_of(plan_digest)
                if plan is not None:
                    body = Body(plan=plan, anchor=anchor, momentum=momentum)
                    return self._count(
                        plan_digest, anchor, momentum, self.me, self.keys.sign(body.signed_bytes)
                    )
        return ()

    def _plan_of(self, plan_digest: str) -> Plan | None:
        return next((plan for plan in self._plans.values() if plan.digest == plan_digest), None)

    def _count(
        self, plan_digest: str, anchor: str, momentum: str, signer: str, signature: Signature
    ) -> Iterable[Effect]:
        signatures = self._signatures.setdefault((plan_digest, anchor, momentum), {})
        signatures[signer] = signature
        plan = self._plan_of(plan_digest)
        if plan is None or not set(plan.signers) <= signatures.keys():
            return ()
        body = Body(plan=plan, anchor=anchor, momentum=momentum)
        certificate = Certificate(body=body, signatures=tuple(signatures[p] for p in plan.signers))
        return (Broadcast(Certificates(head=certificate.head, certificates=(certificate,))),)


def _pair(me: str, plan: Plan) -> Plan:
    """A group of two."""
    other = next((c for c in plan.contributors if c.peer_id != me), None)
    group = tuple(c for c in plan.contributors if c.peer_id == me or c is other)
    total = sum(c.work.tokens for c in group)
    # All else is valid, so that members have to refuse the plan for its small group.
    without = plan.tokens - sum(c.work.tokens for c in plan.contributors) + total
    weighted = tuple(replace(c, weight=c.work.tokens / max(1, total)) for c in group)
    return replace(plan, contributors=weighted, tokens=without)


def _own_weight(me: str, plan: Plan) -> Plan:
    """Only its own work counts."""
    group = tuple(replace(c, weight=1.0 if c.peer_id == me else 0.0) for c in plan.contributors)
    return replace(plan, contributors=group)


def _sybils(me: str, plan: Plan) -> Plan:
    """Adds identities of its own to the roster, which can then sign the next commit."""
    ranks = {member.world_rank for member in plan.roster}
    free = [rank for rank in range(64) if rank not in ranks]
    sybils = tuple(Member(peer_id=f"sybil{rank}", world_rank=rank) for rank in free[:16])
    return replace(plan, roster=tuple(sorted(plan.roster + sybils, key=lambda member: member.world_rank)))


def _alone(me: str, plan: Plan) -> Plan:
    """Removes all others from the roster, so that it alone can sign the next commit."""
    roster = tuple(member for member in plan.roster if member.peer_id == me)
    return replace(plan, roster=roster or (Member(peer_id=me, world_rank=99),))


@dataclass(kw_only=True)
class Forger(Liar):
    """Announces heads of certificates that follow the rules but that it alone has signed; gives these, and a made-up
    state, to whoever asks. It forges them as soon as it comes to a head, at every second one on average."""

    length: int
    _at: str = ""
    """The head that it has last come to."""
    _shown: Sequence[Certificate] = ()
    _forged: dict[str, Sequence[Certificate]] = field(default_factory=dict)
    """By head, the forged certificates that lead to it."""

    def say(self, effect: Effect) -> Iterable[Effect]:
        match effect:
            case Send(_, Certificates(head)) if head in self._forged:
                # Its Peer does not know this head.
                return ()
            case Broadcast(Status() as status):
                if status.head and status.head != self._at:
                    self._at = status.head
                    self._shown = self._forge(self._where_to_part()) if self.rng.random() < 0.5 else ()
                if self._shown:
                    newest = self._shown[-1]
                    status = replace(status, head=newest.head, epoch=newest.plan.epoch, work=None)
                return (Broadcast(status),)
        return (effect,)

    def answer(self, event: Event | None) -> Iterable[Effect]:
        match event:
            case events.Received(sender, Ask(head, have)) if head in self._forged:
                return (self.show(sender, head, have),)
        return ()

    def show(self, sender: str, head: str, have: str) -> Effect:
        path = self._forged[head]
        known = next((count for count, one in enumerate(path, start=1) if one.head == have), 0)
        return Send(sender, Certificates(head=head, certificates=tuple(path[known:][-MAX_CERTIFICATES:])))

    def _where_to_part(self) -> Certificate:
        """The head, one of the two commits before it, or the last one with as small a roster as any."""
        certificate = self.inner.certificate
        assert certificate is not None
        chain = [certificate]
        while (
            not chain[-1].is_genesis and (before := self.inner.chain.get(chain[-1].plan.parent)) is not None
        ):
            chain.append(before)
        smallest = min(chain, key=lambda certificate: len(certificate.plan.roster))
        return self.rng.choice((*chain[:3], smallest))

    def _forge(self, ancestor: Certificate) -> Sequence[Certificate]:
        """`length` epochs longer than its real chain."""
        chain = [ancestor]
        for _ in range(self.inner.epoch - ancestor.plan.epoch + self.length):
            anchor, momentum = self.made_up_digests()
            body = Body(plan=self._plan_on(chain[-1]), anchor=anchor, momentum=momentum)
            certificate = Certificate(body=body, signatures=(self.keys.sign(body.signed_bytes),))
            chain.append(certificate)
            self._forged[body.head] = tuple(chain[1:])
            self.made_up[body.head] = State(
                body.head, body.plan.epoch, anchor, momentum, certificate=certificate
            )
        return chain[1:]

    def made_up_digests(self) -> tuple[str, str]:
        """Of a made-up state's anchor and momentum."""
        return digest("forged", self.rng.random()), digest("forged", self.rng.random())

    def _plan_on(self, parent: Certificate) -> Plan:
        roster = {member.peer_id: member.world_rank for member in parent.plan.roster}
        work = Work(tokens=MAX_TOKENS, norm=1.0, step=0, based_on=parent.plan.epoch, moves=MAX_COUNT)
        return plan_of(
            parent,
            self.rng.randint(0, 1000),
            {self.me: Entry(roster.get(self.me, 0), work)},
            off=self.rng.choice(((), tuple(sorted(roster.keys() - {self.me})))),
            data_width=0,
            settings=self.inner.catch_up.settings,
        )


FORGERS: dict[str, MakeLiar] = {
    "leads groups of two": partial(RogueLeader, twist=_pair),
    "gives itself all weight": partial(RogueLeader, twist=_own_weight),
    "brings sybils": partial(RogueLeader, twist=_sybils),
    "puts everybody off the roster": partial(RogueLeader, twist=_alone),
    "forges a commit": partial(Forger, length=1),
    "forges a long chain": partial(Forger, length=LONG_CHAIN),
}
