"""How a peer enters a run: which manifest it takes, which state it starts from. Pure decisions on a view.

Every peer evaluates these whenever its view changes, so whoever dies in between, the next evaluation leads on.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Literal

from peers.errors import UserError
from peers.protocol.records import NO_RANK, Announcement, View
from peers.protocol.rules import RULES
from peers.schedule import Schedule

Scalar = str | int | float | bool | None
MAX_FRAGMENTS = 4096
MAX_MANIFEST_BYTES = 256 << 10
MAX_LOCAL_STEPS = 1 << 30
MAX_OUTER_REAL = 1000.0
MAX_LOCAL_TIME_S = 1e9


def manifest_digest(manifest: Mapping[str, Scalar]) -> str:
    """Hex sha256 of the canonical JSON."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def check_manifest(value: Any) -> dict[str, Scalar]:
    """A manifest from a peer, if that is what it is; raises ValueError."""
    if not isinstance(value, dict) or len(value) > 256:
        raise ValueError("a manifest is a map of at most 256 fields")
    for key, item in value.items():
        if not isinstance(key, str) or not isinstance(item, (str, int, float, bool, type(None))):
            raise ValueError(f"a manifest holds scalars by name, not {key!r:.40}: {item!r:.40}")
    steps = value.get("hv.local_steps")
    if not (steps is None or (type(steps) is int and 0 < steps <= MAX_LOCAL_STEPS)):
        raise ValueError(f"not a number of local steps: {steps!r:.40}")
    for key in ("hv.outer_lr", "hv.outer_momentum"):
        real = value.get(key)
        if not (real is None or (type(real) in (int, float) and 0 <= real <= MAX_OUTER_REAL)):
            raise ValueError(f"{key} is no number between 0 and {MAX_OUTER_REAL:g}: {real!r:.40}")
    for key, most in (("hv.num_fragments", MAX_FRAGMENTS), ("hv.overlap_steps", MAX_LOCAL_STEPS)):
        count = value.get(key)
        if not (count is None or (type(count) is int and 0 <= count <= most)):
            raise ValueError(f"{key} is no whole number up to {most}: {count!r:.40}")
    rule, weight = value.get("hv.aggregation"), value.get("hv.max_weight")
    if not (rule is None or rule in RULES):
        raise ValueError(f"hv.aggregation is none of {', '.join(RULES)}: {rule!r:.40}")
    if not (weight is None or (type(weight) in (int, float) and 1 <= weight <= MAX_OUTER_REAL)):
        raise ValueError(f"hv.max_weight is no number from 1 to {MAX_OUTER_REAL:g}: {weight!r:.40}")
    trim = value.get("hv.trim")
    if not (trim is None or (type(trim) in (int, float) and 0 < trim <= 0.5)):
        raise ValueError(f"hv.trim is no part of the peers up to half of them: {trim!r:.40}")
    budget = value.get("hv.local_time")
    if not (budget is None or (type(budget) in (int, float) and 0 < budget <= MAX_LOCAL_TIME_S)):
        raise ValueError(f"hv.local_time is no time up to {MAX_LOCAL_TIME_S:g} s: {budget!r:.40}")
    for key in ("hv.mixing", "hv.staleness_discount"):
        part = value.get(key)
        if not (part is None or (type(part) in (int, float) and 0 <= part <= 1)):
            raise ValueError(f"{key} is no number from 0 to 1: {part!r:.40}")
    try:
        Schedule.of(value)
    except UserError as error:
        raise ValueError(str(error)) from error
    if len(json.dumps(value)) > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes")
    return value


def misfits(proposal: Mapping[str, Scalar], theirs: Mapping[str, Scalar]) -> list[str]:
    """Fields of a manifest whose type is not the one that this peer's own proposal has there."""
    return [
        field
        for field in sorted(theirs.keys() & proposal.keys())
        if None not in (theirs[field], proposal[field]) and _kind(theirs[field]) is not _kind(proposal[field])
    ]


def _kind(value: Scalar) -> type:
    """Whole numbers are real numbers, truth values are not."""
    return float if type(value) is int else type(value)


def manifest_differences(
    ours: Mapping[str, Scalar], theirs: Mapping[str, Scalar], named: Collection[str]
) -> list[str]:
    """What the user named that the swarm's manifest contradicts, one line a field."""
    return [
        f"{field}: here {_short(ours[field])}, in the swarm {_short(theirs[field])}"
        for field in sorted(named)
        if field in ours and field in theirs and ours[field] != theirs[field]
    ]


def _short(value: Scalar) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:50]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def manifest_source(
    view: View, *, me: str, galaxy_size: int, waited_out: bool
) -> Announcement | Literal["own"] | None:
    """Whose manifest to adopt. None: wait on. The view includes this peer.

    Of a run that has begun, the one that most of its peers have; before that the lowest rank's, and of peers that have
    none yet the smallest peer id's.
    """
    order = sorted(view.values(), key=lambda p: (p.world_rank == NO_RANK, p.world_rank, p.peer_id))
    holders = [peer for peer in order if peer.peer_id != me and peer.manifest_digest]
    if running := [peer for peer in holders if peer.head]:
        counts = Counter(peer.manifest_digest for peer in running)
        most = max(counts.values())
        return next(peer for peer in running if counts[peer.manifest_digest] == most)
    if holders:
        return holders[0]
    is_lowest = order[0].peer_id == me
    if is_lowest and (order[0].world_rank == 0 or len(view) >= galaxy_size or waited_out):
        return "own"
    return None
