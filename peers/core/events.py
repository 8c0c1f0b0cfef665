"""What happens to a peer."""

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
    """Where several peers stand, by peer id; handled together."""

    statuses: tuple[tuple[str, Status], ...]


@dataclass(frozen=True)
class Connected:
    """There is a channel to a peer: it has yet to say where it stands."""

    peer_id: str


@dataclass(frozen=True)
class Disconnected:
    """The channel to a peer broke."""

    peer_id: str


@dataclass(frozen=True)
class StateOffered:
    """A worker is here for the first time, and this is the state that it could start the run from."""

    offer: Offer


@dataclass(frozen=True)
class WorkerWaits:
    """A worker asks where to begin. Whatever the worker before it had handed over is still averaged."""


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
    """The reduction of this attempt is done; a commit of it leads to a state with these digests."""

    plan: str
    """Digest of the plan."""
    anchor: str
    momentum: str


@dataclass(frozen=True)
class ReduceFailed:
    plan: str
    reason: str
    suspects: frozenset[str] = frozenset()
    """Peers that it was lost to."""
    told_by: frozenset[str] = frozenset()
    """Where they are suspected by the word of others alone, those others."""
    offenders: frozenset[str] = frozenset()
    """Peers that have sent what no honest peer sends, on streams of their own."""


@dataclass(frozen=True)
class Fetched:
    """The state of this head is here, and its digests are those of the certificate."""

    head: str


@dataclass(frozen=True)
class FetchFailed:
    head: str
    reason: str
    suspects: frozenset[str] = frozenset()
    """Donors that did not deliver."""


@dataclass(frozen=True)
class Leave:
    """This peer is about to end."""


@dataclass(frozen=True)
class RoundTrip:
    """Measured to a peer."""

    peer_id: str
    seconds: float


Event = (
    Received
    | Connected
    | StatusesReceived
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
    | Leave
    | RoundTrip
)
