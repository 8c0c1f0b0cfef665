"""Liars (diloco/sim/liars.py) for real daemons: their commits and votes fail one check only, and have real values."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from msgspec.structs import replace

from diloco.sim.forgers import Forger
from diloco.sim.liars import Liar
from peers.core.effects import Broadcast, Effect, Send
from peers.protocol.certificates import Signature
from peers.protocol.messages import Status, Vote
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


class ServingForger(Forger):
    """Its made-up state has real values."""

    @cached_property
    def state(self) -> OuterState:
        return made_up_state()

    def show(self, sender: str, head: str, have: str) -> Effect:
        log.info("%s to %s", SHOWS, sender)
        return super().show(sender, head, have)

    def made_up_digests(self) -> tuple[str, str]:
        return self.state.anchor_digest, self.state.header.momentum_digest


def made_up_state() -> OuterState:
    return OuterState.initial([torch.full((NUMEL,), 7.0)])
