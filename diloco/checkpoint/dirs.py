"""Names of checkpoint directories, and moving, discarding and deleting them.

<path>/model_step_<N>/[diloco_rank_<world rank>/] is renamed from a temporary directory once it is complete.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import uuid
from pathlib import Path

from diloco.checkpoint.mark import COMPLETE, PEER_PART
from peers.state.whole_files import flush_to_disk

STEP = re.compile(r"model_step_(\d+)")
_TEMPORARY = (".partial", ".discarded")


def own_part(world_rank: int | None) -> str:
    return "" if world_rank is None else f"{PEER_PART}{world_rank}"


def step_name(step: int) -> str:
    return f"model_step_{step}"


def temporary_of(final: Path) -> Path:
    """A new temporary name: the daemon may still be writing to a directory left by a worker that died."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")


def temporaries_of(path: Path, part: str) -> list[Path]:
    """Temporary directories that killed workers of this peer have left."""
    pattern = f"model_step_*/.{part}.*" if part else ".model_step_*"
    return [found for found in path.glob(pattern) if found.name.endswith(_TEMPORARY)]


def move(temporary: Path, final: Path) -> None:
    """Rename the temporary directory to `final` and flush it to disk, replacing a checkpoint from before a resume."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if temporary.stat().st_dev != final.parent.stat().st_dev:
        copied = temporary_of(final)
        shutil.copytree(temporary, copied)
        for path in [copied, *copied.rglob("*")]:
            flush_to_disk(path)
        shutil.rmtree(temporary)
        temporary = copied
    if not final.exists():
        temporary.rename(final)
    else:
        empty(final)
        for entry in sorted(temporary.iterdir(), key=lambda entry: entry.name == COMPLETE):
            if entry.name == COMPLETE:
                flush_to_disk(final)
            entry.rename(final / entry.name)
        temporary.rmdir()
        flush_to_disk(final)
    flush_to_disk(final.parent)
    flush_to_disk(final.parent.parent)


def discard(temporary: Path) -> None:
    """Remove a half-written checkpoint. Safe to repeat, and from two threads at once."""
    # Renamed first, so that neither this process nor the daemon adds files while it is being deleted.
    discarded = temporary.with_name(f".{temporary.name.strip('.')}.discarded")
    with contextlib.suppress(OSError):
        temporary.rename(discarded)
        delete(discarded)


def delete(directory: Path) -> None:
    """Delete a checkpoint, and the step's directory if that is then empty. Safe to repeat, and from two threads."""
    empty(directory)
    with contextlib.suppress(OSError):
        directory.rmdir()
        # In a swarm the step's directory contains those of the peers: the last peer to delete its own removes it.
        directory.parent.rmdir()


def empty(directory: Path) -> None:
    """Delete a checkpoint's content, the mark first, but no directories of other peers in it."""
    (directory / COMPLETE).unlink(missing_ok=True)
    for entry in list(directory.iterdir()) if directory.is_dir() else []:
        if entry.name.startswith((PEER_PART, f".{PEER_PART}")):
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
