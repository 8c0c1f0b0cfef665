"""Liars (diloco/sim/liars.py) for real daemons: their commits and votes fail one check only, and have real values."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from msgspec.structs import replace

from diloco.sim.forgers import Forger
from diloco.sim.liars import Liar
from diloco.sim.values import State
from peers.core import events
from peers.core.effects import Broadcast, Effect, Send
from peers.core.events import Event
from peers.core.plans import Entry, plan_of
from peers.protocol.certificates import Body, Certificate, Plan, Signature, Work
from peers.protocol.messages import Ask, Certificates, Status, Vote
from peers.state.outer_state import OuterState

NUMEL = 1000
"""Values in the state that a `ServingForger` makes up; the run must have as many."""
SHOWS = "showing forged commits"
"""In the log of a `ServingForger` that was asked for the certificates that it has forged."""

log = logging.getLogger(__name__)


class ForgesVotes(Liar):
    """Votes for the right digests, with signatures that are not its own."""

    def say(self, effect: Effect) -> Iterable[Effect]:
        if isinstance(effect, Send) and isinstance(effect.message, Vote):
            forged = Signature(public_key=b"", signature=b"forged")
            return (Send(effect.peer_id, replace(effect.message, signature=forged)),)
        return (effect,)


@dataclass(kw_only=True)
class ClaimsRank(Liar):
    """Claims this world rank, whichever it is given."""

    rank: int

    def say(self, effect: Effect) -> Iterable[Effect]:
        if isinstance(effect, Send | Broadcast) and isinstance(effect.message, Status):
            return (replace_message(effect, replace(effect.message, world_rank=self.rank)),)
        return (effect,)


def replace_message(effect: Send | Broadcast, message: Status) -> Effect:
    return Send(effect.peer_id, message) if isinstance(effect, Send) else Broadcast(message)


@dataclass(kw_only=True)
class ServingForger(Forger):
    """Its commits follow the rules, but only it has signed them. Whoever asks is shown them, and sent their state.

    It forges one as soon as it comes to a head (to every second, on average), while the others are still there.
    """

    _at: str = ""
    """The head that it has last come to."""
    _forged: dict[str, Sequence[Certificate]] = field(default_factory=dict)
    """By head, the forged certificates that lead to it."""

    @cached_property
    def state(self) -> OuterState:
        return made_up_state()

    def say(self, effect: Effect) -> Iterable[Effect]:
        match effect:
            case Send(_, Certificates(head, ())) if head in self._forged:
                # The inner Peer does not know this head; `answer` shows it.
                return ()
            case Broadcast(Status(head=head)) if head and head != self._at:
                self._at = head
                lies = self.rng.random() < 0.5
                self._shown = self._forge(self._where_to_part())[-1] if lies else None
        return super().say(effect)

    def invent(self) -> Iterable[Effect]:
        return ()

    def answer(self, event: Event | None) -> Iterable[Effect]:
        match event:
            case events.Received(sender, Ask(head, have)) if head in self._forged:
                log.info("%s to %s", SHOWS, sender)
                path = self._forged[head]
                known = next((n for n, one in enumerate(path, start=1) if one.head == have), 0)
                return (Send(sender, Certificates(head=head, certificates=tuple(path[known:]))),)
        return ()

    def _forge(self, ancestor: Certificate) -> Sequence[Certificate]:
        chain = [ancestor]
        for _ in range(self.length):
            body = Body(
                plan=self._plan_on(chain[-1]),
                anchor=self.state.anchor_digest,
                momentum=self.state.header.momentum_digest,
            )
            chain.append(Certificate(body=body, signatures=(self.keys.sign(body.signed_bytes),)))
            self._forged[body.head] = chain[1:]
            self.made_up[body.head] = State(body.head, body.plan.epoch, body.anchor, body.momentum)
        return chain[1:]

    def _plan_on(self, parent: Certificate) -> Plan:
        roster = {member.peer_id: member.world_rank for member in parent.plan.roster}
        work = Work(tokens=1 << 40, norm=1.0, step=0, based_on=parent.plan.epoch)
        return plan_of(
            parent,
            self.rng.randint(0, 1000),
            {self.me: Entry(roster.get(self.me, 0), work)},
            off=self.rng.choice(((), tuple(roster.keys() - {self.me}))),
            data_width=0,
            settings=self.inner._settings,
        )


def made_up_state() -> OuterState:
    return OuterState.initial([torch.full((NUMEL,), 7.0)])
