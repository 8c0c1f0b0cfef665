"""complete.json, the mark of a complete checkpoint: written last, with the size and digest of every file.

Its `seal` is the BLAKE3 digest of the mark itself with the seal zeroed, so that damage to the mark is detected as well.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from blake3 import blake3

from diloco.errors import UserError
from diloco.outer.diloco import Diloco, Position
from peers.state.header import HEADER_FILE
from peers.state.whole_files import FileRecord, problem_with, write_bytes

COMPLETE = "complete.json"
PEER_PART = "diloco_rank_"
_SEAL = re.compile(rb'"seal": "([0-9a-f]{64})"')
_SEAL_FORMAT = '"seal": "{}"'
_NO_SEAL = "0" * 64
_LARGEST = 2**62


class Damaged(UserError):
    """A file of a checkpoint is not what was saved; the message names it."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The content of complete.json."""

    position: Position
    tokens: tuple[int, ...]
    """For each fragment, the tokens that each rank had trained since the fragment was averaged."""
    num_ranks: int
    steps_per_epoch: int = 0
    """Inner steps of an epoch, in which `position` is; 0 if an earlier version saved it."""
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    """By POSIX path relative to the checkpoint."""
    number: int = 0
    """How many checkpoints this peer had saved before in the same history."""
    saved_at_ms: int = 0
    """Unix time; later than those of the checkpoints that the peer saved before, and of the one that it resumed."""
    contributors: tuple[int, ...] = ()
    """World ranks in the last commit; empty if unknown."""
    head: str = ""
    """Head of the chain in the outer state; empty without a swarm."""

    def to_bytes(self) -> bytes:
        content = {**asdict(self), "seal": _NO_SEAL}
        text = json.dumps(content, indent=2) + "\n"
        seal = blake3(text.encode()).hexdigest()
        return text.replace(_SEAL_FORMAT.format(_NO_SEAL), _SEAL_FORMAT.format(seal)).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Mark:
        """Parse the output of `to_bytes`. Raises ValueError for anything else."""
        found = _SEAL.findall(raw)
        if len(found) != 1:
            raise ValueError("it has no seal, so diloco did not write it, or an earlier version did")
        seal = found[0]
        unsealed = _SEAL.sub(_SEAL_FORMAT.format(_NO_SEAL).encode(), raw)
        if blake3(unsealed).hexdigest().encode() != seal:
            raise ValueError("it was changed after it was saved")
        try:
            return cls._of(json.loads(raw))
        except (TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"its fields are not those of a checkpoint: {error!r:.200}") from error

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Mark:
        return cls(
            position=Position(**{name: _count(value) for name, value in content["position"].items()}),
            tokens=tuple(_count(value) for value in content["tokens"]),
            num_ranks=_count(content["num_ranks"]),
            steps_per_epoch=_count(content.get("steps_per_epoch", 0)),
            files={
                _safe_name(name): FileRecord(_count(record["num_bytes"]), str(record["digest"]))
                for name, record in content["files"].items()
            },
            number=_count(content["number"]),
            saved_at_ms=_count(content["saved_at_ms"]),
            contributors=tuple(_count(value) for value in content["contributors"]),
            # Versions without certificates called this field `lineage`.
            head=str(content.get("head", content.get("lineage", ""))),
        )


def read_mark(directory: Path) -> Mark:
    """The mark of a checkpoint. Raises Damaged if it is missing or invalid."""
    path = directory / COMPLETE
    try:
        return Mark.from_bytes(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} does not describe a checkpoint: {error}") from error


def write_mark(directory: Path, mark: Mark) -> None:
    """Raises OSError."""
    write_bytes(directory / COMPLETE, mark.to_bytes())


def mark_of(outer: Diloco, *, num_ranks: int) -> Mark:
    """The mark of a checkpoint by transformers' Trainer as of now, for `mark_whole` to complete."""
    commit = outer.last_commit
    return Mark(
        position=outer.position,
        tokens=tuple(outer.tokens),
        num_ranks=num_ranks,
        steps_per_epoch=outer.steps_per_epoch,
        contributors=tuple(commit.contributors) if commit else (),
    )


def mark_whole(directory: Path, mark: Mark, files: Mapping[str, FileRecord]) -> Mark:
    """Write this mark of a checkpoint whose files, all on disk, are these. Raises OSError."""
    header = directory / HEADER_FILE
    head = str(json.loads(header.read_bytes())["head"]) if header.exists() else ""
    mark = replace(mark, files=files, saved_at_ms=time.time_ns() // 1_000_000, head=head)
    write_mark(directory, mark)
    return mark


def problems_of(directory: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """One sentence for each of these files that is missing, truncated or altered."""
    found = ((directory / name, problem_with(directory / name, record)) for name, record in files.items())
    return [f"{path} {problem}" for path, problem in found if problem]


def names_below(directory: Path) -> set[str]:
    """The files of a checkpoint without its mark and other peers' parts, as POSIX paths."""
    paths = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    return {
        path.as_posix()
        for path in paths
        if path.name != COMPLETE and not path.parts[0].startswith((PEER_PART, "."))
    }


def _safe_name(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"it names a file outside of the checkpoint: {name!r:.80}")
    return name


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"not a count: {value!r:.40}")
    return value
