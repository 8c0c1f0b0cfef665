"""The values of a state, as what is in them.

Every inner step of a worker makes a piece, which is a number of its own. An anchor is the set of pieces that commits
have brought into it, a worker's weights are an anchor and the pieces that no commit has taken in yet, and a reduction
adds up what its members have handed over. So a lost or doubled step is seen, which real weights would hide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Offer

Pieces = frozenset[int]
NOTHING: Pieces = frozenset()


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
        """As what a founder starts a run from."""
        return Offer(anchor=self.anchor, momentum=self.momentum, certificate=self.certificate)

    @property
    def genesis(self) -> str:
        """Head of the first commit that it comes of."""
        state = self
        while state.parent is not None:
            state = state.parent
        return state.head

    def leads_to(self, other: State | None) -> bool:
        """Whether `other` is this state, or follows it."""
        while other is not None and other.head != self.head and other.epoch >= self.epoch:
            other = other.parent
        return other is not None and other.head == self.head


@dataclass(frozen=True)
class Reduced:
    """What the reduction of a plan has brought to a member, and what a commit of it leads to."""

    plan: Plan
    pieces: Pieces
    doubled: Pieces
    """What two members have brought, or what was in the state before."""
    anchor: str
    momentum: str


def initial_state(name: str) -> State:
    """Weights that have never been trained; equal where the names are."""
    return State("", 0, digest("initial anchor", name), digest("no momentum"))


def reduce_parts(state: State, plan: Plan, parts: Mapping[str, Pieces]) -> Reduced:
    """What a member in this state computes from everybody's part; members in the same state get the same digests."""
    pieces: Pieces = NOTHING.union(*parts.values())
    doubled = pieces & state.pieces
    if sum(map(len, parts.values())) != len(pieces):
        doubled |= {piece for piece in pieces if sum(piece in part for part in parts.values()) > 1}
    name = digest(state.anchor, plan.digest, sorted(pieces), sorted(doubled))
    return Reduced(plan, pieces, doubled, digest("anchor", name), digest("momentum", state.momentum, name))


def apply_outcome(state: State, outcome: Reduced, certificate: Certificate, now: float) -> State:
    return _state_of(certificate, state.pieces | outcome.pieces, outcome.anchor, outcome.momentum, state, now)


def begin_from(offered: State, certificate: Certificate, now: float) -> State:
    """The state of a genesis, of a founder that offers its values."""
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
