"""<run dir>/phase.json: what a peer is doing, as its own process last wrote it, for whoever shows it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from peers.protocol.reports import Phase

PHASE = "phase.json"
_LENGTH = 512


class _Written(msgspec.Struct, frozen=True):
    time: float
    """Unix seconds."""
    phase: Phase


def write_phase(run_dir: Path, phase: Phase) -> None:
    """In one piece, whoever is killed meanwhile. A disk that is full costs the picture, and no training."""
    text = msgspec.json.encode(_Written(time.time(), phase))
    with (
        contextlib.suppress(OSError),
        os.fdopen(os.open(run_dir / PHASE, os.O_WRONLY | os.O_CREAT, 0o644), "wb", 0) as file,
    ):
        # Over what was there, with blanks to a length that few phases exceed; who reads between the two finds nothing.
        file.write(text.ljust(_LENGTH))
        file.truncate()


def read_phase(run_dir: Path, since: float) -> Phase | None:
    """What was written at `since` (Unix seconds) or later, if anything was."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        written = msgspec.json.decode((run_dir / PHASE).read_bytes(), type=_Written)
        return written.phase if written.time >= since else None
    return None
