"""A checkpoint's directories: their names, and how one takes another's place.

<path>/model_step_<N>/[diloco_rank_<world rank>/]: a directory appears under its name only when everything is in it.
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
    """A name that nobody else uses: what a life before has left there may still be written to by its daemon."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")


def temporaries_of(path: Path, part: str) -> list[Path]:
    """What lives of this peer that were killed have left half-written."""
    pattern = f"model_step_*/.{part}.*" if part else ".model_step_*"
    return [found for found in path.glob(pattern) if found.name.endswith(_TEMPORARY)]


def move(temporary: Path, final: Path) -> None:
    """Give the directory its name, for good. One of that name, from before a resume, gives way only now."""
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
    """Take a half-written checkpoint away from whoever is writing it. Safe to repeat, and from two threads at once."""
    # Under another name nothing can be added to it, neither by us nor by the daemon.
    discarded = temporary.with_name(f".{temporary.name.strip('.')}.discarded")
    with contextlib.suppress(OSError):
        temporary.rename(discarded)
        delete(discarded)


def delete(directory: Path) -> None:
    """Delete a checkpoint, and what it leaves empty. Safe to repeat, and from two threads at once."""
    empty(directory)
    with contextlib.suppress(OSError):
        directory.rmdir()
        # In a swarm the step's directory lies around those of the peers; the last one takes it along.
        directory.parent.rmdir()


def empty(directory: Path) -> None:
    """Delete a checkpoint's own content, the mark first; parts of a swarm's peers beside it are theirs."""
    (directory / COMPLETE).unlink(missing_ok=True)
    for entry in list(directory.iterdir()) if directory.is_dir() else []:
        if entry.name.startswith((PEER_PART, f".{PEER_PART}")):
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
