"""The records that peers publish in the DHT: signed, bounded, and short-lived."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache, lru_cache
from typing import Annotated, ClassVar, Literal, Self, TypeVar, get_args

from msgspec import Meta
from msgspec.msgpack import Decoder
from msgspec.structs import asdict

from peers.errors import ProtocolError, UserError
from peers.protocol.certificates import Keys, Signature, verify_signature
from peers.protocol.limits import (
    MAX_MESSAGE_BYTES,
    ClaimedRank,
    Count,
    HashOrNone,
    PeerId,
    Real,
    RunId,
    ShortText,
    TokenBytes,
    WorldRank,
)
from peers.protocol.maddrs import parse_maddr
from peers.protocol.messages import Status
from peers.protocol.wire import Struct, decode, encode
from peers.timing import CLOCK_TOLERANCE_S, RECORD_TTL_S

PROTOCOL = 2
"""Increased by every change after which older versions cannot be in one swarm with newer ones: a peer of another
version reads no more than this number of a record."""
MAX_RECORD_BYTES = 4096
"""In the DHT."""
MAX_SPOKEN_BYTES = MAX_MESSAGE_BYTES // 2
"""In the mesh, where records include the status of the core. Enough for the certificate of MAX_PEERS peers with Ed25519
keys; and News whose last record is this long still fits into MAX_MESSAGE_BYTES."""
State = Literal["joining", "waiting", "training", "averaging", "leaving"]
STATES = frozenset(get_args(State))
TRAINING_STATES = frozenset({"training", "averaging"})
"""States of a peer that counts when the swarm's progress is determined."""
MAX_AGE_S = 6 * RECORD_TTL_S
"""Older announcements are ignored, whatever their expiry says."""

NO_RANK = -1
"""Stands for the world rank of a peer that has none yet."""
MAX_MADDRS = 8
MAX_ENDPOINTS = 4
MAX_LOST = 16
MAX_PATHS = 32
"""Paths in one announcement; in a larger swarm the others are left out."""

T = TypeVar("T")


def PEERS_KEY(run_id: str) -> str:
    """The DHT key of a run's announcements; the subkeys are peer ids."""
    return f"diloco/{run_id}/peers"


def COORDINATOR_KEY(run_id: str) -> str:
    """The DHT key under which a run's coordinator announces itself; the subkeys are peer ids."""
    return f"diloco/{run_id}/coordinator"


def ISSUERS_KEY(run_id: str) -> str:
    """The DHT key under which whoever issues tokens announces itself; the subkeys are peer ids."""
    return f"diloco/{run_id}/issuers"


class Path(StrEnum):
    """The kinds of path for bytes to a peer, in order of preference."""

    DIRECT = "direct"
    """TCP with TLS 1.3."""
    PLAIN = "plain"
    """TCP without TLS."""
    LIBP2P = "libp2p"
    """A stream of libp2p's daemon, p2pd."""
    RELAY = "relay"
    """Through a third peer, TLS 1.3 from end to end."""


class Untimely(ProtocolError):
    """A record that is too old, or from the future; by the clock of the peer that passed it on, perhaps neither."""


class OtherVersion(ProtocolError):
    """A record of a peer whose version of diloco has another protocol. The message is for the user."""

    def __init__(self, protocol: int) -> None:
        super().__init__(
            f"the peers of this run use another version of diloco (protocol {protocol}, this one has {PROTOCOL}): "
            "install the same"
        )


class Record(Struct, frozen=True, kw_only=True):
    """What a peer states about itself at `time` (Unix seconds)."""

    max_bytes: ClassVar[int] = MAX_RECORD_BYTES
    peer_id: PeerId
    run_id: RunId
    maddrs: Annotated[tuple[ShortText, ...], Meta(max_length=MAX_MADDRS)]
    time: Real
    token: TokenBytes = b""
    """Admits the peer (peers/net/gate.py); the reader checks it. Empty in an open swarm."""

    def encode(self, keys: Keys) -> bytes:
        """The signed record, as the DHT stores it under the subkey `peer_id`. Raises ValueError if it is too long."""
        return seal(encode(self), keys, self.max_bytes)

    @classmethod
    def decode(cls, peer_id: str, blob: bytes, now: float, *, run_id: str | None = None) -> Self:
        """The record in `blob`. Raises ProtocolError unless it is valid, current, signed by this peer, of `run_id`."""
        payload = unseal(peer_id, blob, cls.max_bytes)
        record = decode(_decoder(cls), payload, cls.max_bytes, what=f"record of {peer_id}")
        if record.peer_id != peer_id or run_id not in (None, record.run_id):
            raise ProtocolError(
                f"a record of {peer_id} that belongs to {record.peer_id!r}, run {record.run_id!r}"
            )
        if not now - MAX_AGE_S <= record.time <= now + CLOCK_TOLERANCE_S:
            raise Untimely(f"a record of {peer_id} that is {now - record.time:.0f} s old")
        try:
            record.check_addresses()
        except UserError as error:
            raise ProtocolError(f"a record of {peer_id}: {error!s:.200}") from error
        return record

    def check_addresses(self) -> None:
        """Raises UserError."""
        for text in self.maddrs:
            parse_maddr(text)


class Announcement(Record, frozen=True, kw_only=True):
    """The current state of one peer."""

    world_rank: ClaimedRank
    incarnation: Count
    """Start of the process in Unix nanoseconds: increases when the peer restarts."""
    state: State
    epoch: Count
    head: HashOrNone
    """Hash of the certificate of its state; empty before it has a state of the run."""
    step: Count
    """Nominal step: epoch times steps per epoch plus local step."""
    local_step: Count
    committed_tokens: Count
    """Tokens averaged into the anchor, over all epochs and peers. Informational: no decision depends on it."""
    tokens_per_s: Real
    anchor_digest: HashOrNone
    """Empty before the peer has an anchor."""
    manifest_digest: HashOrNone
    """Empty before the peer has agreed on a manifest."""
    step_s: Real = 0.0
    """Seconds per local step; 0: not known."""
    endpoints: Annotated[tuple[ShortText, ...], Meta(max_length=MAX_ENDPOINTS)] = ()
    """TCP addresses on which this peer accepts data streams (/ip4/…/tcp/…)."""
    paths: Annotated[tuple[tuple[WorldRank, Path], ...], Meta(max_length=MAX_PATHS)] = ()
    """The path of its streams to each peer, by world rank. Informational."""

    def check_addresses(self) -> None:
        Record.check_addresses(self)
        for maddr in map(parse_maddr, self.endpoints):
            if not maddr.port or maddr.peer_id:
                raise UserError(f"{maddr} is no endpoint: it needs a port, and names no peer")


class Lost(Struct, frozen=True):
    """A peer to which the channel broke, and the version of the last announcement heard from it."""

    peer_id: PeerId
    incarnation: Count
    number: Count

    @property
    def version(self) -> tuple[int, int]:
        return self.incarnation, self.number


class Spoken(Announcement, frozen=True, kw_only=True):
    """The announcement as peers send it to one another: with the status of the peer's core, on which the decisions of
    other cores depend. The DHT does not hold the status, which changes too often."""

    max_bytes: ClassVar[int] = MAX_SPOKEN_BYTES
    status: Status | None = None
    """None: the peer has no core yet."""
    number: Count = 0
    """Increases with every announcement of this process."""
    lost: Annotated[tuple[Lost, ...], Meta(max_length=MAX_LOST)] = ()

    @classmethod
    def of(
        cls, announcement: Announcement, status: Status | None, number: int = 0, lost: tuple[Lost, ...] = ()
    ) -> Self:
        return cls(**asdict(announcement), status=status, number=number, lost=lost)

    @property
    def version(self) -> tuple[int, int]:
        """Of two announcements of one peer, the one with the greater version is newer."""
        return self.incarnation, self.number


class CoordinatorRecord(Record, frozen=True):
    """The addresses of a run's coordinator, or of a peer that issues its tokens."""


View = Mapping[str, Announcement]
"""By peer id, the newest announcement of each live peer, this peer included."""


class Sealed(Struct, frozen=True):
    """An encoded record and the signature of its peer. This stays as it is: all versions have to be able to read it."""

    payload: bytes
    signature: Signature
    protocol: Count = 0
    """PROTOCOL of the version that the peer has. It is not signed: whoever changes it only makes the record unreadable.
    0: a version before there were numbers."""


def seal(payload: bytes, keys: Keys, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Sign a payload. Raises ValueError if the result would exceed `max_bytes`."""
    blob = encode(Sealed(payload=payload, signature=keys.sign(payload), protocol=PROTOCOL))
    if len(blob) > max_bytes:
        raise ValueError(f"a record of {len(blob)} bytes; at most {max_bytes} are read")
    return blob


def unseal(peer_id: str, blob: bytes, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """The payload of a sealed record. Raises ProtocolError unless this peer has signed it, and OtherVersion if only
    another version of diloco can read it."""
    sealed = decode(_decoder(Sealed), blob, max_bytes, what="record")
    verify = _is_signed if len(blob) <= MAX_RECORD_BYTES else verify_signature
    if not verify(peer_id, sealed.payload, sealed.signature):
        raise ProtocolError(f"a record of {peer_id} is not signed by it")
    if sealed.protocol != PROTOCOL:
        raise OtherVersion(sealed.protocol)
    return sealed.payload


def shown_rank(world_rank: int) -> str:
    """The rank as shown to people."""
    return "–" if world_rank == NO_RANK else str(world_rank)


# Cached: the same record comes from several DHT nodes and is read repeatedly. Long ones would take too much memory.
_is_signed = lru_cache(maxsize=1024)(verify_signature)


@cache
def _decoder(kind: type[T]) -> Decoder[T]:
    return Decoder(kind)
