"""<run dir>/phase.json: what a peer is doing, as its own process last wrote it, for whoever shows it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from peers.protocol.reports import Phase

PHASE = "phase.json"


class _Written(msgspec.Struct, frozen=True):
    time: float
    """Unix seconds."""
    phase: Phase


def write_phase(run_dir: Path, phase: Phase) -> None:
    """In one piece. A disk that is full costs the picture, and no training."""
    path = run_dir / PHASE
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        new.write_bytes(msgspec.json.encode(_Written(time.time(), phase)))
        new.replace(path)


def read_phase(run_dir: Path, since: float) -> Phase | None:
    """What was written at `since` (Unix seconds) or later, if anything was."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        written = msgspec.json.decode((run_dir / PHASE).read_bytes(), type=_Written)
        return written.phase if written.time >= since else None
    return None
