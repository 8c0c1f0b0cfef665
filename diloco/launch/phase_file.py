"""<run dir>/phase.json, in which a peer's process writes its current phase for the live view."""

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
    """Overwrite the phase with a single write. Errors, such as a full disk, are ignored."""
    text = msgspec.json.encode(_Written(time.time(), phase))
    with (
        contextlib.suppress(OSError),
        os.fdopen(os.open(run_dir / PHASE, os.O_WRONLY | os.O_CREAT, 0o644), "wb", 0) as file,
    ):
        # Padded to a fixed length, so that the write replaces the old content. If the old content was even longer, a
        # reader between write and truncate finds invalid JSON, and reports no phase.
        file.write(text.ljust(_LENGTH))
        file.truncate()


def read_phase(run_dir: Path, since: float) -> Phase | None:
    """The phase, if it was written at `since` (Unix seconds) or later."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        written = msgspec.json.decode((run_dir / PHASE).read_bytes(), type=_Written)
        return written.phase if written.time >= since else None
    return None
