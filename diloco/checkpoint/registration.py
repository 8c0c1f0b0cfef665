"""Registers the peers that save at a place: each has a file there with its first start and whether it has saved."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping

from diloco.checkpoint.choice import Registration
from diloco.checkpoint.mark import PEER_PART

SAVERS = "savers"
"""Directory of the registration files."""


def registration_of(before: bytes | None, *, has_saved: bool) -> bytes:
    """The new content of a peer's registration file, given its old content; the time of the first start is kept."""
    at_ms = time.time_ns() // 1_000_000 if before is None else _registration(before).at_ms
    return json.dumps({"at_ms": at_ms, "has_saved": has_saved}).encode()


def savers_of(registered: Mapping[str, bytes], with_marks: Iterable[str]) -> dict[int, Registration]:
    """Registrations by world rank, from the registration files (by part) and the parts that have marks."""
    found = {name: _registration(raw) for name, raw in registered.items()}
    found |= {name: Registration() for name in with_marks}
    ranks = {name: name.removeprefix(PEER_PART) for name in found}
    return {int(ranks[name]): one for name, one in found.items() if ranks[name].isdecimal()}


def _registration(raw: bytes) -> Registration:
    """An unreadable file counts as a peer that has saved, so that it makes no other peer start from the beginning."""
    try:
        content = json.loads(raw)
        return Registration(at_ms=int(content["at_ms"]), has_saved=bool(content["has_saved"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Registration()
