"""The outputs of `Peer.handle`. A runtime carries effects out in order, all of them before the next event is handled.

Reduce and Fetch only start something, whose outcome is an event; all others are done when they return. While an effect
takes long, the runtime repeats the last Status at each heartbeat, so that others do not take a busy peer for lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Message


@dataclass(frozen=True)
class Send:
    """Send to one peer. A message that cannot be delivered is dropped; Disconnected or silence reveals it."""

    peer_id: str
    message: Message


@dataclass(frozen=True)
class Broadcast:
    """Send to every peer that this one has a channel to."""

    message: Message


@dataclass(frozen=True)
class Pledge:
    """Store durably, before any later effect, that this peer has signed at this attempt on this head.

    After a restart the peer is given its pledges, so that it never signs twice at one attempt.
    """

    head: str
    attempt: int


@dataclass(frozen=True)
class Reduce:
    """Reduce the work in hand with the members of this plan. Ends a reduction that is still running.

    Answered by Reduced or ReduceFailed, within `timeout_s`.
    """

    plan: Plan
    timeout_s: float


@dataclass(frozen=True)
class CancelReduce:
    """End the running reduction and report no outcome."""


@dataclass(frozen=True)
class Apply:
    """Advance anchor, momentum, epoch and head together by the result of the last reduction."""

    certificate: Certificate


@dataclass(frozen=True)
class Fetch:
    """Get the state of `path[-1]` from any of the donors: whole, or by replaying the commits of `path`.

    Answered by Fetched or FetchFailed, within `timeout_s`. Ends a fetch that is still running.
    """

    path: tuple[Certificate, ...]
    """Each follows the one before it; the first follows this peer's state, if that link is known."""
    donors: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True)
class Adopt:
    """Make the fetched state (a founder's: the offered one) this peer's state.

    The old anchor, which the worker's weights are based on, is kept until they are rebased.
    """

    certificate: Certificate


@dataclass(frozen=True)
class Rebase:
    """Rebase the work in hand onto this peer's state: anchor + (local - the anchor it was trained on)."""


@dataclass(frozen=True)
class Answer:
    """Answer the worker that has handed over its work, or that waits to begin.

    contributed: the work is in the state; continue from the anchor.
    rebase: it is not; continue from anchor + (local - the anchor it was trained on), and keep counting its tokens.
    keep: it is not, and the newer state is still being fetched; continue from the weights as they are.
    begin: to a worker that asked where to begin; start from the anchor.
    """

    how: Literal["contributed", "rebase", "keep", "begin"]
    certificate: Certificate
    """Of the state that the worker continues from; with keep, of the one that is being fetched."""
    local_step: int
    """The local step of its epoch to continue from."""
    epoch_s: float = 0.0
    """How long that epoch may last; 0: as long as its steps take."""

    @property
    def epoch(self) -> int:
        """Outer steps done when the worker continues."""
        return self.certificate.plan.epoch

    @property
    def data_base(self) -> int:
        """First sample of that epoch."""
        return self.certificate.plan.data_base


@dataclass(frozen=True)
class GoAhead:
    """Let the worker train on in the next epoch while the work it handed over waits for its commit. An Answer still
    follows; the worker puts what it trained meanwhile on top of the weights that it then gets."""

    epoch: int
    data_base: int
    """First sample of that epoch, as this peer predicts it."""
    epoch_s: float = 0.0
    """As in Answer."""


@dataclass(frozen=True)
class Tell:
    """For people: logs, status, events. Nothing depends on it."""

    kind: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)


Effect = (
    Send
    | Broadcast
    | Pledge
    | Reduce
    | CancelReduce
    | Apply
    | Fetch
    | Adopt
    | Rebase
    | Answer
    | GoAhead
    | Tell
)
