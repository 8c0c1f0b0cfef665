"""The messages of the protocol between peers' cores (peers/core), part of the wire format of the mesh (mesh.py).

any     -> any      Status        head, phase, work handed over; at every change and heartbeat, inside the peer's
                                  announcement (records.py)
leader  -> member   Propose       who averages, with which weights, and the roster after it
member  -> leader   Vote          the member's signature under what it would commit
member  -> leader   Decline       the member cannot take part, and why
leader  -> member   Abort         this attempt has failed
any     -> any      Certificates  commits that happened; self-certifying, so any peer may pass them on
any     -> any      Ask           for the certificates that lead to a head
founder -> founder  Found         the proposed genesis
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.msgpack import Decoder

from peers.protocol.certificates import Body, Certificate, Plan, Signature, Work
from peers.protocol.limits import (
    MAX_CERTIFICATES,
    MAX_MESSAGE_BYTES,
    MAX_PEERS,
    AttemptNumber,
    ClaimedRank,
    Count,
    Epoch,
    Hash,
    HashOrNone,
    PeerId,
    Real,
    ShortText,
)
from peers.protocol.wire import Struct, decode

Phase = Literal["waiting", "fetching", "training", "ready", "leaving"]
"""waiting: has no state of the run, or no worker; ready: the worker has handed over its weights."""


class Offer(Struct, frozen=True):
    """A state that a founder could start the run from."""

    anchor: Hash
    momentum: Hash
    certificate: Certificate | None = None
    """Of the checkpoint that it comes from; None: it was never trained."""

    @property
    def epoch(self) -> int:
        return self.certificate.plan.epoch if self.certificate else 0

    @property
    def parent(self) -> str:
        """The head of the checkpoint, or empty."""
        return self.certificate.head if self.certificate else ""


class Status(Struct, frozen=True, tag="status"):
    """The state of one peer. Ordered by (incarnation, sequence)."""

    incarnation: Count
    """Start of the process in Unix nanoseconds: increases when the peer restarts."""
    sequence: Count
    world_rank: ClaimedRank
    phase: Phase
    head: HashOrNone = ""
    epoch: Epoch = 0
    attempt: AttemptNumber = 0
    work: Work | None = None
    """Handed over for the next commit on this head."""
    offer: Offer | None = None
    """From a peer without a head: the state that it could start the run from."""
    local_step: Count = 0
    step_s: Real = 0.0
    """Seconds per inner step; 0: not known."""


class Propose(Struct, frozen=True, tag="propose"):
    plan: Plan


class Vote(Struct, frozen=True, tag="vote"):
    """`plan` is the digest of the plan that was reduced. The signature is over the body with these digests."""

    head: HashOrNone
    attempt: AttemptNumber
    plan: Hash
    anchor: Hash
    momentum: Hash
    signature: Signature


class Decline(Struct, frozen=True, tag="decline"):
    head: HashOrNone
    attempt: AttemptNumber
    reason: ShortText
    suspects: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_PEERS)] = ()
    """If the reduction failed: the members that made it fail."""
    told_by: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_PEERS)] = ()
    """If `suspects` is hearsay only: the members that named them."""


class OddVote(Struct, frozen=True):
    """One member's vote, as proof of what it voted for."""

    peer_id: PeerId
    anchor: Hash
    momentum: Hash
    signature: Signature


class Abort(Struct, frozen=True, tag="abort"):
    head: HashOrNone
    attempt: AttemptNumber
    reason: ShortText
    lost: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_PEERS)] = ()
    """Members to leave out of the next attempt."""
    votes: Annotated[tuple[OddVote, ...], Meta(max_length=MAX_PEERS)] = ()
    """If digests differed: all votes, so that every member can see whose differ."""


class Certificates(Struct, frozen=True, tag="certificates"):
    """Linked, oldest first, up to `head`. Empty: the sender does not know `head`, or not any more."""

    head: Hash
    certificates: Annotated[tuple[Certificate, ...], Meta(max_length=MAX_CERTIFICATES)]

    @property
    def is_path(self) -> bool:
        """Whether the certificates are linked and end at `head`, so that no others were slipped in."""
        parents = [*(certificate.plan.parent for certificate in self.certificates[1:]), self.head]
        return parents == [certificate.head for certificate in self.certificates]


class Ask(Struct, frozen=True, tag="ask"):
    """A request for the certificates that lead to `head`, from the one after `have` on."""

    head: Hash
    have: HashOrNone = ""


class Found(Struct, frozen=True, tag="found"):
    body: Body


Directed = Propose | Vote | Decline | Abort | Certificates | Ask | Found
"""Messages that are sent by themselves; a Status is part of an announcement."""
Message = Status | Directed

_decoder: Decoder[Message] = Decoder(Message)


def decode_message(blob: bytes) -> Message:
    """Raises ProtocolError for anything outside the limits of the types."""
    return decode(_decoder, blob, MAX_MESSAGE_BYTES)
