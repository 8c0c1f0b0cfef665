"""What peers tell each other through the DHT: signed, bounded, and soon out of date."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import msgpack

from peers.access.tokens import MAX_TOKEN_BYTES
from peers.errors import ProtocolError
from peers.identity import Identity, verify
from peers.network.maddrs import is_maddr, parse_maddr
from peers.network.path_choice import Path

MAX_RECORD_BYTES = 4096
State = Literal["joining", "waiting", "training", "averaging", "leaving"]
STATES = frozenset(get_args(State))
CLOCK_TOLERANCE_S = 10.0
"""How far in the future another machine's clock may put a record."""
MAX_AGE_S = 120.0
"""An older announcement is nobody's present, whatever its expiry says."""

MAX_WORLD_RANKS = 1 << 20
NO_RANK = -1
"""The world rank of a peer that has none yet."""
MAX_MADDRS = 8
MAX_ENDPOINTS = 4
MAX_PATHS = 32
"""A larger swarm is shown in part."""

_MAX_COUNT = 1 << 62
_MAX_REAL = 1e15
_MAX_TEXT_CHARACTERS = 300
_PATHS = [path.value for path in Path]
_DIGEST = re.compile(r"[0-9a-f]{0,128}")


def PEERS_KEY(run_id: str) -> str:
    """The DHT key of a run's announcements; the subkeys are peer ids."""
    return f"diloco/{run_id}/peers"


def COORDINATOR_KEY(run_id: str) -> str:
    """The DHT key under which a run's coordinator announces itself; the subkeys are peer ids."""
    return f"diloco/{run_id}/coordinator"


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """How one peer stands at `time` (Unix seconds)."""

    peer_id: str
    run_id: str
    world_rank: int
    incarnation: int
    """Start of the process, Unix nanoseconds: tells a restarted peer from its former self."""
    state: State
    """One of STATES."""
    epoch: int
    head: str
    """Hash of the certificate of its state; empty before it has one of the run."""
    step: int
    """Nominal: epoch times local steps plus local step."""
    local_step: int
    committed_tokens: int
    """Tokens averaged into the anchor, over all epochs and peers: for people, it decides nothing."""
    tokens_per_s: float
    anchor_digest: str
    """Empty before the peer has any anchor."""
    manifest_digest: str
    """Empty before the peer has agreed on a manifest."""
    maddrs: tuple[str, ...]
    time: float
    step_s: float = 0.0
    """Seconds that a local step takes; 0: not known."""
    endpoints: tuple[str, ...] = ()
    """Where this peer takes calls for data over TCP of its own (/ip4/…/tcp/…)."""
    paths: tuple[tuple[int, str], ...] = ()
    """By which path its streams go, by world rank: for people to see."""
    token: bytes = b""
    """Its right to be here (peers/admission.py), for the reader to check; empty in an open swarm."""

    def encode(self, identity: Identity) -> bytes:
        """The record for the DHT, under `identity.peer_id` as its subkey."""
        return seal(dataclasses.asdict(self), identity)

    @classmethod
    def decode(cls, peer_id: str, blob: bytes, now: float, *, run_id: str | None = None) -> Announcement:
        """What this peer announced. Raises ProtocolError unless all of it is in order, and of `run_id`."""
        fields = unseal(peer_id, blob)
        _check(fields, _ANNOUNCEMENT_CHECKS, peer_id=peer_id, run_id=run_id, now=now)
        paths = tuple((rank, path) for rank, path in fields["paths"])
        lists = {name: tuple(fields[name]) for name in ("maddrs", "endpoints")}
        return cls(**{**fields, **lists, "paths": paths})


@dataclass(frozen=True, kw_only=True)
class CoordinatorRecord:
    """Where the coordinator of a run, or whoever issues its tokens, is to be found."""

    peer_id: str
    run_id: str
    maddrs: tuple[str, ...]
    time: float
    token: bytes = b""
    """As in an Announcement."""

    def encode(self, identity: Identity) -> bytes:
        """The record for the DHT, under `identity.peer_id` as its subkey."""
        return seal(dataclasses.asdict(self), identity)

    @classmethod
    def decode(cls, peer_id: str, blob: bytes, now: float, *, run_id: str | None = None) -> CoordinatorRecord:
        """Raises ProtocolError."""
        fields = unseal(peer_id, blob)
        _check(fields, _COMMON_CHECKS, peer_id=peer_id, run_id=run_id, now=now)
        return cls(**{**fields, "maddrs": tuple(fields["maddrs"])})


def shown_rank(world_rank: int) -> str:
    """For people."""
    return "–" if world_rank == NO_RANK else str(world_rank)


def seal(fields: dict[str, Any], identity: Identity) -> bytes:
    """`fields` as a signed record. Raises ValueError if it would exceed MAX_RECORD_BYTES."""
    payload = msgpack.packb(fields)
    blob: bytes = msgpack.packb([payload, identity.public_key, identity.sign(payload)])
    if len(blob) > MAX_RECORD_BYTES:
        raise ValueError(f"a record of {len(blob)} bytes; at most {MAX_RECORD_BYTES} are read")
    return blob


def unseal(peer_id: str, blob: bytes) -> dict[str, Any]:
    """The fields of a record that this peer signed. Raises ProtocolError."""
    if len(blob) > MAX_RECORD_BYTES:
        raise ProtocolError(f"a record of {len(blob)} bytes; at most {MAX_RECORD_BYTES} are allowed")
    envelope = _unpack(blob)
    if not isinstance(envelope, list) or [type(part) for part in envelope] != [bytes, bytes, bytes]:
        raise ProtocolError("a record is a payload, a key and a signature")
    payload, public_key, signature = envelope
    if not _is_signed(peer_id, public_key, payload, signature):
        raise ProtocolError(f"a record of {peer_id} is not signed by it")
    fields = _unpack(payload)
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ProtocolError(f"a record of {peer_id} is no map of named fields")
    return fields


# The same record is found at several DHT nodes, and by its reader once more.
_is_signed = lru_cache(maxsize=1024)(verify)


def _unpack(blob: bytes) -> Any:
    try:
        return msgpack.unpackb(blob, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a record is not msgpack: {error!r}") from error


def _check(fields: dict[str, Any], checks: Checks, *, peer_id: str, run_id: str | None, now: float) -> None:
    if set(fields) != set(checks):
        raise ProtocolError(f"a record of {peer_id} with other fields than ours: {sorted(fields)!r:.200}")
    for name, is_valid in checks.items():
        if not is_valid(fields[name]):
            raise ProtocolError(f"a record of {peer_id} with {name}={fields[name]!r:.100}")
    if fields["peer_id"] != peer_id or run_id not in (None, fields["run_id"]):
        raise ProtocolError(
            f"a record of {peer_id} that belongs to {fields['peer_id']!r}, run {fields['run_id']!r}"
        )
    if not now - MAX_AGE_S <= fields["time"] <= now + CLOCK_TOLERANCE_S:
        raise ProtocolError(f"a record of {peer_id} that is {now - fields['time']:.0f} s old")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT_CHARACTERS


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MAX_REAL


def _are_maddrs(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_MADDRS
        and all(_is_text(v) and is_maddr(v) for v in value)
    )


def _are_endpoints(value: Any) -> bool:
    return (
        _are_maddrs(value)
        and len(value) <= MAX_ENDPOINTS
        and all(maddr.port and not maddr.peer_id for maddr in map(parse_maddr, value))
    )


def _are_paths(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_PATHS
        and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
        and all(_is_count(rank) and rank < MAX_WORLD_RANKS and path in _PATHS for rank, path in value)
    )


TRAINING_STATES = frozenset({"training", "averaging"})
"""States of a peer that counts for what the swarm has reached."""

View = Mapping[str, Announcement]
"""Peer id -> newest announcement, of live peers only, this peer itself included."""

Checks = Mapping[str, Callable[[Any], bool]]

_COMMON_CHECKS: Checks = {
    "peer_id": _is_text,
    "run_id": _is_text,
    "maddrs": _are_maddrs,
    "time": _is_real,
    "token": lambda value: isinstance(value, bytes) and len(value) <= MAX_TOKEN_BYTES,
}
_ANNOUNCEMENT_CHECKS: Checks = {
    **_COMMON_CHECKS,
    "world_rank": lambda value: type(value) is int and NO_RANK <= value < MAX_WORLD_RANKS,
    "incarnation": _is_count,
    "state": lambda value: isinstance(value, str) and value in STATES,
    "epoch": _is_count,
    "head": _is_digest,
    "step": _is_count,
    "local_step": _is_count,
    "committed_tokens": _is_count,
    "tokens_per_s": _is_real,
    "step_s": _is_real,
    "anchor_digest": _is_digest,
    "manifest_digest": _is_digest,
    "endpoints": _are_endpoints,
    "paths": _are_paths,
}
