"""The values of a state, represented by the training that they contain.

Every inner step of a worker makes a *piece* of each fragment, a unique number. An anchor is the set of pieces that
commits have added to it. A worker's weights are an anchor and the pieces that no commit contains yet. A reduction is
the union of its members' pieces. So a lost or doubled step is detected, which real weights would hide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Offer

Pieces = frozenset[int]
NOTHING: Pieces = frozenset()


def fragment_of(piece: int, num_fragments: int) -> int:
    return piece % num_fragments


def digest(*parts: object) -> str:
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class State:
    """Anchor, momentum, epoch and head, which move together. `head` is empty for a state that is only offered."""

    head: str
    epoch: int
    anchor: str
    momentum: str
    pieces: Pieces = NOTHING
    certificate: Certificate | None = field(default=None, repr=False)
    parent: State | None = field(default=None, repr=False)
    made_at: float = 0.0
    """When the first peer had it."""

    @property
    def offer(self) -> Offer:
        """This state as the offer of a founder."""
        return Offer(anchor=self.anchor, momentum=self.momentum, certificate=self.certificate)

    @property
    def genesis(self) -> str:
        """Head of the first certificate that it descends from."""
        state = self
        while state.parent is not None:
            state = state.parent
        return state.head

    def leads_to(self, other: State | None) -> bool:
        """Whether `other` is this state, or a descendant of it."""
        while other is not None and other.head != self.head and other.epoch >= self.epoch:
            other = other.parent
        return other is not None and other.head == self.head


@dataclass(frozen=True)
class Reduced:
    """The result of a reduction at one member, and the digests of the state that its commit would lead to."""

    plan: Plan
    pieces: Pieces
    doubled: Pieces
    """Pieces that two members contributed, or that were in the state before."""
    anchor: str
    momentum: str


def initial_state(name: str) -> State:
    """An untrained state; equal names give equal states."""
    return State("", 0, digest("initial anchor", name), digest("no momentum"))


def reduce_parts(state: State, plan: Plan, parts: Mapping[str, Pieces]) -> Reduced:
    """The result that a member in this state computes from all parts. Members in equal states get equal digests."""
    pieces: Pieces = NOTHING.union(*parts.values())
    doubled = pieces & state.pieces
    if sum(map(len, parts.values())) != len(pieces):
        doubled |= {piece for piece in pieces if sum(piece in part for part in parts.values()) > 1}
    name = digest(state.anchor, plan.digest, sorted(pieces), sorted(doubled))
    return Reduced(plan, pieces, doubled, digest("anchor", name), digest("momentum", state.momentum, name))


def apply_outcome(state: State, outcome: Reduced, certificate: Certificate, now: float) -> State:
    return _state_of(certificate, state.pieces | outcome.pieces, outcome.anchor, outcome.momentum, state, now)


def begin_from(offered: State, certificate: Certificate, now: float) -> State:
    """The state of a genesis, at a founder that offered its values."""
    parent = offered if offered.head else None
    return _state_of(certificate, offered.pieces, offered.anchor, offered.momentum, parent, now)


def _state_of(
    certificate: Certificate, pieces: Pieces, anchor: str, momentum: str, parent: State | None, now: float
) -> State:
    plan = certificate.plan
    return State(
        head=certificate.head,
        epoch=plan.epoch,
        anchor=anchor,
        momentum=momentum,
        pieces=pieces,
        certificate=certificate,
        parent=parent,
        made_at=now,
    )
