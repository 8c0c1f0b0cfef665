"""What a peer wants done. A runtime carries effects out in order, each before the next event is handled.

Reduce and Fetch only begin something; its outcome is an event. All others are over when they are carried out. While an
effect takes long, the runtime repeats the last Status at each heartbeat: a busy peer is not a silent one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Message


@dataclass(frozen=True)
class Send:
    """To one peer. What cannot be delivered is lost: a Disconnected or silence tells of it."""

    peer_id: str
    message: Message


@dataclass(frozen=True)
class Broadcast:
    """To every peer that this one has a channel to."""

    message: Message


@dataclass(frozen=True)
class Pledge:
    """Write down, before anything after it is sent, that this peer has signed at this attempt on this head.

    A peer that comes back is given it, so that it does not sign twice.
    """

    head: str
    attempt: int


@dataclass(frozen=True)
class Reduce:
    """Reduce the work in hand with the members of this plan; end whatever reduction still runs.

    Answered by Reduced or ReduceFailed, within `timeout_s`.
    """

    plan: Plan
    timeout_s: float


@dataclass(frozen=True)
class CancelReduce:
    """End the reduction that runs; its outcome no longer matters."""


@dataclass(frozen=True)
class Apply:
    """Advance anchor, momentum, epoch and head together by the result of the last reduction."""

    certificate: Certificate


@dataclass(frozen=True)
class Fetch:
    """Get the state of `path[-1]`, from any of the donors: whole, or by repeating the commits of `path`.

    Answered by Fetched or FetchFailed, within `timeout_s`. A fetch that still runs ends.
    """

    path: tuple[Certificate, ...]
    """Linked; the first follows the state that is here, where that is known."""
    donors: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True)
class Adopt:
    """Make the state that has been fetched (or, of a founder, offered) this peer's state.

    The anchor that the worker's weights are based on is kept until they are rebased.
    """

    certificate: Certificate


@dataclass(frozen=True)
class Rebase:
    """Make the work in hand work on top of this peer's state: anchor + (local - the anchor it was trained on)."""


@dataclass(frozen=True)
class Answer:
    """Answer the worker that has handed over its work, or that waits to begin.

    contributed: the work is in the state; go on from the anchor.
    rebase: it is not; go on from anchor + (local - the anchor it was trained on), and keep counting its tokens.
    keep: the same, but the newer state is not here yet; go on from the weights as they are.
    begin: to a worker that asked where to begin; from the anchor.
    """

    how: Literal["contributed", "rebase", "keep", "begin"]
    certificate: Certificate
    """Of the state that the worker goes on from; with keep, of the one that is being fetched."""
    local_step: int
    """Of its epoch, to go on from."""

    @property
    def epoch(self) -> int:
        """Outer steps done where the worker goes on."""
        return self.certificate.plan.epoch

    @property
    def data_base(self) -> int:
        """First data block of that epoch."""
        return self.certificate.plan.data_base


@dataclass(frozen=True)
class GoAhead:
    """Let the worker train on while what it has handed over waits for its commit: in the next epoch, as if that were
    made. An Answer still follows, and what was trained meanwhile stays on top of it."""

    epoch: int
    data_base: int
    """Where that epoch's data begins, as far as this peer can tell."""


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
