"""The inputs of `Peer.handle`."""

from __future__ import annotations

from dataclasses import dataclass

from peers.protocol.certificates import Work
from peers.protocol.messages import Message, Offer, Status


@dataclass(frozen=True)
class Received:
    """A message from a peer whose identity the transport has checked."""

    peer_id: str
    message: Message


@dataclass(frozen=True)
class StatusesReceived:
    """Statuses of several peers, by peer id; handled together."""

    statuses: tuple[tuple[str, Status], ...]


@dataclass(frozen=True)
class StillHere:
    """The mesh, in which each of many peers has channels to a few others, still hears of these peers."""

    peer_ids: frozenset[str]


@dataclass(frozen=True)
class Connected:
    """A channel to a peer has opened. The peer's status is still to come."""

    peer_id: str


@dataclass(frozen=True)
class Disconnected:
    """The channel to a peer broke."""

    peer_id: str


@dataclass(frozen=True)
class StateOffered:
    """The first worker of this peer has connected; this is the state that it could start the run from."""

    offer: Offer


@dataclass(frozen=True)
class WorkerWaits:
    """A worker asks where to begin. Work that its predecessor handed over is still averaged."""


@dataclass(frozen=True)
class WorkerTrains:
    """A worker's progress in its epoch."""

    local_step: int
    step_s: float = 0.0


@dataclass(frozen=True)
class WorkReady:
    """The worker has handed over its weights for the next commit."""

    work: Work
    """`based_on` is filled in by the core."""


@dataclass(frozen=True)
class WorkerGone:
    """The worker has ended."""


@dataclass(frozen=True)
class Reduced:
    """A reduction has succeeded; committing it would lead to a state with these digests."""

    plan: str
    """Digest of the plan."""
    anchor: str
    momentum: str


@dataclass(frozen=True)
class ReduceFailed:
    plan: str
    reason: str
    suspects: frozenset[str] = frozenset()
    """Peers that made it fail."""
    told_by: frozenset[str] = frozenset()
    """If `suspects` is hearsay only: the peers that named them."""
    offenders: frozenset[str] = frozenset()
    """Peers that sent, on their own streams, what no honest peer sends."""


@dataclass(frozen=True)
class Fetched:
    """The state of this head was fetched, and its digests are those of the certificate."""

    head: str


@dataclass(frozen=True)
class FetchFailed:
    head: str
    reason: str
    suspects: frozenset[str] = frozenset()
    """Donors that did not deliver."""


@dataclass(frozen=True)
class LogNeeded:
    """Whether peers that download this peer's state will need all commits that it has recorded, of which the next one
    would drop the oldest. So until it is told again."""

    is_needed: bool


@dataclass(frozen=True)
class Leave:
    """This peer is about to shut down."""


@dataclass(frozen=True)
class RoundTrip:
    """A measured round trip to a peer."""

    peer_id: str
    seconds: float


Event = (
    Received
    | Connected
    | StatusesReceived
    | StillHere
    | Disconnected
    | StateOffered
    | WorkerWaits
    | WorkerTrains
    | WorkReady
    | WorkerGone
    | Reduced
    | ReduceFailed
    | Fetched
    | FetchFailed
    | LogNeeded
    | Leave
    | RoundTrip
)
