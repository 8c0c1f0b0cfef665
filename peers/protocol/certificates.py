"""A certificate: the signed record of one outer step. Certificates, linked by their parent's hash, are the chain.

Every contributor signs the body, which holds the digests of the anchor and momentum that the step leads to: the vote is
the signature. The hash of the body is the new head. The chain begins with a genesis, which the whole first roster
signs. Structs that occur once per peer are encoded without field names, which would be a third of a certificate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Annotated, Protocol

from msgspec import Meta
from msgspec.msgpack import Decoder

from peers.protocol import libp2p_keys
from peers.protocol.limits import (
    MAX_MESSAGE_BYTES,
    MAX_PEERS,
    AttemptNumber,
    Count,
    Epoch,
    Hash,
    HashOrNone,
    KeyBytes,
    Norm,
    PeerId,
    Real,
    Share,
    SignatureBytes,
    Tokens,
    WorldRank,
)
from peers.protocol.wire import Struct, decode, encode

_SIGNED_AS = b"diloco commit v4\0"


class Member(Struct, frozen=True, array_like=True):
    """One peer of a roster."""

    peer_id: PeerId
    world_rank: WorldRank


class Work(Struct, frozen=True, array_like=True):
    """What one worker has handed over for a fragment, without the values."""

    tokens: Tokens
    """Trained since its work on this fragment was last in a commit."""
    norm: Norm
    """L2 norm of its contribution."""
    step: Count
    """The nominal inner step at which its weights were copied."""
    based_on: Count
    """The epoch of the anchor that it was trained from; it was rebased onto the commits since."""
    last: bool = False
    """The peer leaves after this commit."""
    bandwidth: Real = 0.0
    """Measured bandwidth of its link in bytes per second; 0: not known."""
    moves: Count = 0
    """How often its peer has moved to another head, over restarts, from any number on. It orders the peer's signatures:
    the one with more moves is the later one."""


class Contributor(Struct, frozen=True, array_like=True):
    """One peer's part in a commit."""

    peer_id: PeerId
    world_rank: WorldRank
    work: Work
    weight: Share


class Plan(Struct, frozen=True, dict=True):
    """Everything about a commit that is known before its reduction. The leader proposes it, every member checks it."""

    manifest: Hash
    """Digest of the manifest; the whole chain has the same."""
    parent: HashOrNone
    """The head that this follows. In a genesis: the head of the checkpoint that it starts from, or empty."""
    epoch: Epoch
    """Outer steps done, this one included."""
    fragment: Count
    attempt: AttemptNumber
    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=MAX_PEERS)]
    """In order of world rank; empty in a genesis."""
    roster: Annotated[tuple[Member, ...], Meta(min_length=1, max_length=MAX_PEERS)]
    """Who may sign the next commit, in order of world rank."""
    data_base: Count
    """The first sample of the next epoch: blocks may have another size when the run is resumed."""
    tokens: Count
    """Averaged into the anchor so far, over all epochs and peers. Informational: no decision depends on it."""

    @cached_property
    def digest(self) -> str:
        """Identifies the plan in votes."""
        return hashlib.sha256(encode(self)).hexdigest()

    @cached_property
    def signers(self) -> tuple[str, ...]:
        """The peers that have to sign: the contributors; in a genesis, the roster."""
        return tuple(member.peer_id for member in self.contributors or self.roster)

    @cached_property
    def signer_set(self) -> frozenset[str]:
        return frozenset(self.signers)

    @cached_property
    def roster_set(self) -> frozenset[str]:
        return frozenset(member.peer_id for member in self.roster)


class Body(Struct, frozen=True, dict=True):
    """What is signed: a plan, and the digests of the state that it leads to."""

    plan: Plan
    anchor: Hash
    momentum: Hash

    @cached_property
    def signed_bytes(self) -> bytes:
        return _SIGNED_AS + encode(self)

    @cached_property
    def head(self) -> str:
        return hashlib.sha256(self.signed_bytes).hexdigest()


class Signature(Struct, frozen=True, array_like=True):
    """A peer's signature. The key comes along, since not every peer id contains it."""

    public_key: KeyBytes
    signature: SignatureBytes


def verify_signature(peer_id: str, payload: bytes, signature: Signature) -> bool:
    """Whether this peer has signed this payload: its id is the hash of its key, or the key itself."""
    return libp2p_keys.verify(peer_id, signature.public_key, payload, signature.signature)


class Keys(Protocol):
    """This peer's identity key."""

    @property
    def peer_id(self) -> str: ...

    def sign(self, payload: bytes) -> Signature: ...


Verify = Callable[[str, bytes, Signature], bool]
"""(peer id, payload, signature) -> whether this peer has signed this."""


class Certificate(Struct, frozen=True):
    """`signatures` are in the order of `body.plan.signers`."""

    body: Body
    signatures: Annotated[tuple[Signature, ...], Meta(min_length=1, max_length=MAX_PEERS)]

    @property
    def head(self) -> str:
        return self.body.head

    @property
    def plan(self) -> Plan:
        return self.body.plan

    @property
    def num_bytes(self) -> int:
        """Approximate size of its encoding."""
        return certificate_bytes(len(self.plan.roster), len(self.plan.contributors))

    @property
    def is_genesis(self) -> bool:
        return not self.plan.contributors

    def is_signed(self, verify: Verify, *, first: Collection[str] = ()) -> bool:
        """Whether each of its signers has signed it, once. `first`: the signers to verify first."""
        signers = self.plan.signers
        if len(signers) != len(self.signatures) or len(set(signers)) != len(signers):
            return False
        payload = self.body.signed_bytes
        pairs = sorted(zip(signers, self.signatures, strict=True), key=lambda pair: pair[0] not in first)
        return all(verify(signer, payload, signature) for signer, signature in pairs)


def certificate_bytes(num_members: int, num_contributors: int) -> int:
    """Approximate size of an encoded certificate."""
    return 512 + 256 * num_members + 512 * num_contributors


_decoder = Decoder(Certificate)


def decode_certificate(blob: bytes) -> Certificate:
    """Raises ProtocolError if `blob` is no certificate."""
    return decode(_decoder, blob, MAX_MESSAGE_BYTES, what="certificate")
