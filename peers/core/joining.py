"""How a peer enters a run: which manifest it adopts, and whether that contradicts the user. Pure functions of a view.

Every peer evaluates them again whenever its view changes, so a peer that dies meanwhile holds nobody up.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from peers.core.schedule import AS_LONG_AS_THE_ROUND, Schedule
from peers.core.weights import Aggregation
from peers.errors import UserError
from peers.protocol.aggregation import Rule
from peers.protocol.limits import Share
from peers.protocol.mesh import Scalar
from peers.protocol.records import NO_RANK, Announcement, View
from peers.timing import FORGET_S, START_S

MAX_FRAGMENTS = 4096
MAX_MANIFEST_BYTES = 256 << 10
MAX_LOCAL_STEPS = 1 << 30
MAX_OUTER_REAL = 1000.0
MAX_LOCAL_TIME_S = 1e9
_MAX_MEMBERS = 4
_AUTO = {"hv.local_time": 0, "hv.overlap_steps": AS_LONG_AS_THE_ROUND}
"""The values that stand for `auto` in a manifest."""

_OuterReal = Annotated[float, Meta(ge=0, le=MAX_OUTER_REAL)]


class _Outer(msgspec.Struct, frozen=True, rename=lambda name: f"hv.{name}"):
    """The fields of a manifest that define the outer steps. Missing ones have published defaults (defaults.py)."""

    local_steps: Annotated[int, Meta(ge=1, le=MAX_LOCAL_STEPS)] | None = None
    local_time: Annotated[float, Meta(ge=0, le=MAX_LOCAL_TIME_S)] | None = None
    """0: learned."""
    outer_lr: _OuterReal | None = None
    outer_momentum: _OuterReal | None = None
    num_fragments: Annotated[int, Meta(ge=0, le=MAX_FRAGMENTS)] | None = None
    overlap_steps: Annotated[int, Meta(ge=AS_LONG_AS_THE_ROUND, le=MAX_LOCAL_STEPS)] | None = None
    aggregation: Rule | None = None
    max_weight: Annotated[float, Meta(ge=1, le=MAX_OUTER_REAL)] | None = None
    trim: Annotated[float, Meta(gt=0, le=0.5)] | None = None
    """A share of the peers."""
    mixing: Share | None = None
    staleness_discount: Share | None = None


def manifest_digest(manifest: Mapping[str, Scalar]) -> str:
    """Hex sha256 of the canonical JSON."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def check_manifest(manifest: Mapping[str, Scalar]) -> None:
    """Raises ValueError unless this peer can run by another peer's manifest."""
    try:
        msgspec.convert(manifest, _Outer)
        Schedule.of(manifest)
        Aggregation.of(manifest)
    except (msgspec.ValidationError, UserError, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"not a manifest: {error!s:.300}") from error
    if len(json.dumps(manifest)) > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes")


def misfits(proposal: Mapping[str, Scalar], theirs: Mapping[str, Scalar]) -> list[str]:
    """Fields of another peer's manifest whose type differs from that in this peer's own proposal."""
    return [
        field
        for field in sorted(theirs.keys() & proposal.keys())
        if None not in (theirs[field], proposal[field]) and _kind(theirs[field]) is not _kind(proposal[field])
    ]


def _kind(value: Scalar) -> type:
    """int counts as float, bool does not."""
    return float if type(value) is int else type(value)


def manifest_differences(
    ours: Mapping[str, Scalar], theirs: Mapping[str, Scalar], named: Collection[str]
) -> list[str]:
    """One line per field that the user set (`named`) and that the swarm's manifest contradicts."""
    return [
        f"{field}: here {here}, in the swarm {there}"
        for field in sorted(named)
        if field in ours and field in theirs and ours[field] != theirs[field]
        for here, there in [_told_apart(field, ours, theirs)]
    ]


def _told_apart(field: str, ours: Mapping[str, Scalar], theirs: Mapping[str, Scalar]) -> tuple[str, str]:
    """Both values of a field, as text that shows where they differ."""
    if field == "model":
        names = str(ours.get("path_model") or ""), str(theirs.get("path_model") or "")
        if all(name and name.isprintable() for name in names) and names[0] != names[1]:
            return f"{names[0]:.60}", f"{names[1]:.60}"
        here, there = _members(ours[field]), _members(theirs[field])
        unlike = [name for name in sorted(here) if here[name] != there.get(name)][:_MAX_MEMBERS]
        if unlike:
            return _listed(here, unlike), _listed(there, unlike)
    if field in _AUTO:
        typed = ["auto" if side[field] == _AUTO[field] else side[field] for side in (ours, theirs)]
        return _short(typed[0]), _short(typed[1])
    return _short(ours[field]), _short(theirs[field])


def _listed(members: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name} {_short(members.get(name))}" for name in names)


def _members(value: Scalar) -> dict[str, Any]:
    """The members of a JSON object; empty for anything else."""
    try:
        found = json.loads(str(value))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:50]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def manifest_source(
    view: View, *, me: str, galaxy_size: int, late_s: float
) -> Announcement | Literal["own"] | None:
    """Whose manifest to adopt; "own": this peer's; None: wait. The view includes this peer. `late_s`: the time since
    the founders' deadline, negative before it.

    If the run has begun, the manifest that most of its peers have. Before that, the manifest of the peer with the
    lowest world rank; among peers without a rank, of the one with the smallest peer id. After the deadline, each peer
    publishes its own, START_S later for each peer before it, FORGET_S at most: those may hang, or claim ranks and never
    publish anything.
    """
    order = sorted(view.values(), key=lambda p: (p.world_rank == NO_RANK, p.world_rank, p.peer_id))
    holders = [peer for peer in order if peer.peer_id != me and peer.manifest_digest]
    if running := [peer for peer in holders if peer.head]:
        counts = Counter(peer.manifest_digest for peer in running)
        most = max(counts.values())
        return next(peer for peer in running if counts[peer.manifest_digest] == most)
    if holders:
        return holders[0]
    place = next(place for place, peer in enumerate(order) if peer.peer_id == me)
    is_complete = order[0].world_rank == 0 or len(view) >= galaxy_size
    if (place == 0 and is_complete) or late_s > min(START_S * place, FORGET_S):
        return "own"
    return None
