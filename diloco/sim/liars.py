"""Byzantine members: a Peer whose messages are altered on their way out, or that invents messages. Each signs with its
own key only, and is otherwise a normal peer with a worker, a disk and links."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from diloco.sim.values import State, digest
from peers.core import effects, events
from peers.core.effects import Broadcast, Effect, Send
from peers.core.events import Event
from peers.core.peer import Peer
from peers.protocol.certificates import Body, Keys, Plan
from peers.protocol.limits import MAX_TOKENS
from peers.protocol.messages import Abort, Certificates, Decline, Message, Propose, Status, Vote

LIE_EVERY_S = 2.0


@dataclass(kw_only=True)
class Liar:
    """Behaves like its inner Peer; subclasses override that. Takes the place of a Peer in either runtime."""

    inner: Peer
    keys: Keys
    rng: random.Random
    now: float
    made_up: dict[str, State] = field(default_factory=dict)
    """States that it serves although no run has led to them, by head."""
    lies_at: float = 0.0
    never_says: tuple[type, ...] = ()
    """Kinds of effects, and of messages to one peer, that it leaves out."""

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def me(self) -> str:
        return self.keys.peer_id

    @property
    def deadline(self) -> float:
        return min(self.inner.deadline, self.lies_at)

    def handle(self, event: Event | None, now: float) -> list[Effect]:
        self.now = now
        said = [said for effect in self.inner.handle(self.hear(event), now) for said in self.say(effect)]
        said += self.answer(event)
        if now >= self.lies_at:
            self.lies_at = now + LIE_EVERY_S
            said += self.invent()
        return said

    def hear(self, event: Event | None) -> Event | None:
        return event

    def say(self, effect: Effect) -> Iterable[Effect]:
        """What is done instead of this effect."""
        said = effect.message if isinstance(effect, Send) else effect
        return () if isinstance(said, self.never_says) else (effect,)

    def answer(self, event: Event | None) -> Iterable[Effect]:
        return ()

    def invent(self) -> Iterable[Effect]:
        """Effects of its own, every LIE_EVERY_S."""
        return ()

    def others(self) -> list[str]:
        certificate = self.inner.certificate
        members = certificate.plan.roster if certificate is not None else ()
        return [member.peer_id for member in members if member.peer_id != self.me]


@dataclass(kw_only=True)
class OtherDigests(Liar):
    """Votes for random digests."""

    _plans: dict[str, Plan] = field(default_factory=dict)

    def say(self, effect: Effect) -> Iterable[Effect]:
        if isinstance(effect, effects.Reduce):
            self._plans[effect.plan.digest] = effect.plan
        if isinstance(effect, Send) and isinstance(effect.message, Vote):
            vote = effect.message
            if (plan := self._plans.get(vote.plan)) is not None:
                body = Body(plan=plan, anchor=digest(self.rng.random()), momentum=vote.momentum)
                signature = self.keys.sign(body.signed_bytes)
                return (Send(effect.peer_id, replace(vote, anchor=body.anchor, signature=signature)),)
        return (effect,)


class ClaimsTokens(Liar):
    """Claims to have trained more tokens than any peer can."""

    def hear(self, event: Event | None) -> Event | None:
        if isinstance(event, events.WorkReady):
            return events.WorkReady(replace(event.work, tokens=MAX_TOKENS))
        return event


class AbortingLeader(Liar):
    """As the leader, proposes and aborts at once."""

    def say(self, effect: Effect) -> Iterable[Effect]:
        if isinstance(effect, Send) and isinstance(effect.message, Propose):
            plan = effect.message.plan
            lost = (self.rng.choice(self.others()),) if self.others() else ()
            return effect, Send(
                effect.peer_id, Abort(head=plan.parent, attempt=plan.attempt, reason="so I say", lost=lost)
            )
        return (effect,)


class Decliner(Liar):
    """Declines every plan."""

    def answer(self, event: Event | None) -> Iterable[Effect]:
        match event:
            case events.Received(leader, Propose(plan)):
                return (Send(leader, self._decline(plan, leader)),)
        return ()

    def _decline(self, plan: Plan, leader: str) -> Decline:
        return Decline(head=plan.parent, attempt=plan.attempt, reason="no")


class Accuser(Decliner):
    """Declines every plan and blames a random other member; its own proposals are honest."""

    def _decline(self, plan: Plan, leader: str) -> Decline:
        others = [p for p in plan.signers if p not in (self.me, leader)] or [leader]
        return Decline(
            head=plan.parent, attempt=plan.attempt, reason="lost it", suspects=(self.rng.choice(others),)
        )


class Withholder(Liar):
    """Tells half of the others nothing of commits."""

    def say(self, effect: Effect) -> Iterable[Effect]:
        match effect:
            case Broadcast(Certificates() as message):
                others = self.others()
                return [Send(p, message) for p in self.rng.sample(others, k=len(others) // 2)]
            case Send(_, Certificates(head, _)):
                return (Send(effect.peer_id, Certificates(head=head, certificates=())),)
        return (effect,)


@dataclass(kw_only=True)
class Replayer(Liar):
    """Sends old messages again, its own and those of others."""

    _old: list[Message] = field(default_factory=list)

    def say(self, effect: Effect) -> Iterable[Effect]:
        if isinstance(effect, Send | Broadcast) and len(self._old) < 1000:
            self._old.append(effect.message)
        return (effect,)

    def answer(self, event: Event | None) -> Iterable[Effect]:
        if isinstance(event, events.Received) and not isinstance(event.message, Status):
            self._old.append(event.message)
        return ()

    def invent(self) -> Iterable[Effect]:
        return [Broadcast(message) for message in self.rng.sample(self._old, k=min(5, len(self._old)))]


MakeLiar = Callable[..., Any]
"""Makes a liar from the fields of Liar, to take the place of a Peer."""

LIARS: dict[str, MakeLiar] = {
    "votes for other digests": OtherDigests,
    "claims tokens": ClaimsTokens,
    "is silent as a leader": partial(Liar, never_says=(Propose, Abort)),
    "aborts what it leads": AbortingLeader,
    "does not reduce": partial(Liar, never_says=(effects.Reduce,)),
    "declines": partial(Decliner, never_says=(effects.Reduce, Propose)),
    "accuses": partial(Accuser, never_says=(effects.Reduce,)),
    "withholds commits": Withholder,
    "replays": Replayer,
}
