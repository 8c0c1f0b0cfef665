"""A checkpoint's directories: their names, the mark of a complete one, and how one takes another's place.

<path>/model_step_<N>/[diloco_rank_<world rank>/]: a directory appears under its name only when everything is in it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

from diloco.errors import UserError
from diloco.outer import Diloco, Position, Restored

COMPLETE = "complete.json"
_PEER_PART = "diloco_rank_"
_STEP = re.compile(r"model_step_(\d+)")


def own_part(world_rank: int | None) -> str:
    return "" if world_rank is None else f"{_PEER_PART}{world_rank}"


def temporary_of(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def write_complete(directory: Path, outer: Diloco, num_ranks: int) -> None:
    content = {"position": asdict(outer.position), "tokens": outer.tokens, "num_ranks": num_ranks}
    text = json.dumps(content, indent=2)
    (directory / COMPLETE).write_text(text + "\n", encoding="utf-8")


def read_complete(directory: Path) -> tuple[Restored, int]:
    """What write_complete wrote, and of how many ranks. Raises UserError for anything else."""
    try:
        content = json.loads((directory / COMPLETE).read_text(encoding="utf-8"))
        position = Position(**content["position"])
        restored = Restored(position=position, tokens=tuple(map(int, content["tokens"])), directory=directory)
        return restored, int(content["num_ranks"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{directory / COMPLETE} does not describe a checkpoint: {error!r}") from error


def move(temporary: Path, final: Path) -> None:
    """Give the directory its name. One of that name, from before a resume, gives way only now."""
    if not final.exists():
        temporary.rename(final)
        return
    _empty(final)
    for entry in sorted(temporary.iterdir(), key=lambda entry: entry.name == COMPLETE):
        entry.rename(final / entry.name)
    temporary.rmdir()


def delete(directory: Path) -> None:
    """Delete a checkpoint, and what it leaves empty. Safe to repeat, and from two threads at once."""
    _empty(directory)
    with contextlib.suppress(OSError):
        directory.rmdir()
        # In a swarm the step's directory lies around those of the peers; the last one takes it along.
        directory.parent.rmdir()


def _empty(directory: Path) -> None:
    """Delete a checkpoint's own content, the mark first; parts of a swarm's peers beside it are theirs."""
    (directory / COMPLETE).unlink(missing_ok=True)
    for entry in list(directory.iterdir()) if directory.is_dir() else []:
        if entry.name.startswith((_PEER_PART, f".{_PEER_PART}")):
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def complete_ones(path: Path, part: str) -> list[Path]:
    """The complete checkpoints of a peer, oldest first."""
    steps = {}
    for directory in path.glob("model_step_*"):
        match = _STEP.fullmatch(directory.name)
        if match and (directory / part / COMPLETE).is_file():
            steps[int(match[1])] = directory / part
    return [steps[step] for step in sorted(steps)]
