"""What peers say to each other about the run.

everybody -> everybody  Status        where I stand, what my worker has handed over; at every change and heartbeat
leader    -> member     Propose       who averages, with which weights, and what the roster is after it
member    -> leader     Vote          my signature under what I would commit
member    -> leader     Decline       I cannot take part, and why
leader    -> member     Abort         this attempt has failed
anybody   -> anybody    Certificates  commits that happened; they prove themselves, whoever hands them over
anybody   -> anybody    Ask           for certificates that lead to a head
founder   -> founder    Found         the genesis that I propose
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
    """Of the checkpoint that it comes from; none: it has never been trained."""

    @property
    def epoch(self) -> int:
        return self.certificate.plan.epoch if self.certificate else 0

    @property
    def parent(self) -> str:
        """The head of the checkpoint, or empty."""
        return self.certificate.head if self.certificate else ""


class Status(Struct, frozen=True, tag="status"):
    """Where one peer stands. A newer one of the same incarnation has a larger sequence number."""

    incarnation: Count
    """Start of the process, Unix nanoseconds: tells a restarted peer from its former self."""
    sequence: Count
    world_rank: ClaimedRank
    phase: Phase
    genesis: HashOrNone = ""
    head: HashOrNone = ""
    epoch: Epoch = 0
    attempt: AttemptNumber = 0
    work: Work | None = None
    """Handed over for the next commit on this head."""
    offer: Offer | None = None
    """Of a founder."""
    local_step: Count = 0
    step_s: Real = 0.0
    """Seconds that an inner step takes; 0: not known."""


class Propose(Struct, frozen=True, tag="propose"):
    plan: Plan


class Vote(Struct, frozen=True, tag="vote"):
    """`plan` is the digest of the plan that was reduced; the signature is under the body with these digests."""

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
    """Where the reduction failed: the members it was lost to."""
    told_by: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_PEERS)] = ()
    """Where those are suspected by the word of other members alone, these."""


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
    """Where digests differed: all votes, so that everybody sees who is the odd one."""


class Certificates(Struct, frozen=True, tag="certificates"):
    """Linked, oldest first, up to `head`. None: `head` is not known here, or not any more."""

    head: Hash
    certificates: Annotated[tuple[Certificate, ...], Meta(max_length=MAX_CERTIFICATES)]


class Ask(Struct, frozen=True, tag="ask"):
    head: Hash
    """Wanted: the certificates that lead to this one."""
    have: HashOrNone = ""
    """No further back than to this one."""


class Found(Struct, frozen=True, tag="found"):
    body: Body


Message = Status | Propose | Vote | Decline | Abort | Certificates | Ask | Found

_decoder: Decoder[Message] = Decoder(Message)


def decode_message(blob: bytes) -> Message:
    """Raises ProtocolError for anything outside the limits of the types."""
    return decode(_decoder, blob, MAX_MESSAGE_BYTES)
