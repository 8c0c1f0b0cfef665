"""The interface to the place where checkpoints are kept: a directory, or a URL that fsspec supports.

A checkpoint is assembled in a local staging directory and then handed to the store. A local store renames it into
place; a remote one uploads the files one by one, the mark last.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from diloco.checkpoint.choice import Registration
from diloco.checkpoint.dirs import STEP, own_part
from diloco.checkpoint.mark import COMPLETE, PEER_PART
from diloco.checkpoint.registration import SAVERS, registration_of, savers_of


class Store(abc.ABC):
    """`part` is a peer's directory within a step's, empty without a swarm. All methods may raise OSError."""

    @abc.abstractmethod
    def name_of(self, name: str, part: str) -> str:
        """The path or URL of a step's checkpoint, for messages."""

    def marks(self, part: str) -> dict[str, bytes]:
        """The contents of complete.json of a peer's checkpoints, by step name."""
        return self._marks_of((name, (name, part)) for name in self._names() if STEP.fullmatch(name))

    def parts(self, name: str) -> dict[str, bytes]:
        """The contents of complete.json of all peers' checkpoints of a step, by part."""
        return self._marks_of(
            (part, (name, part)) for part in self._names(name) if part.startswith(PEER_PART)
        )

    def mark(self, name: str, part: str) -> bytes | None:
        """The content of complete.json; None if there is none."""
        return self._read(name, part, COMPLETE)

    def register(self, world_rank: int, *, has_saved: bool = False) -> None:
        """Record that this peer saves here, or that it has completed a checkpoint. Keeps the time of the first call."""
        file = (SAVERS, own_part(world_rank))
        before = self._read(*file)
        if has_saved or before is None:
            self._put(registration_of(before, has_saved=has_saved), *file)

    def savers(self) -> dict[int, Registration]:
        """World ranks that have registered here, or that have checkpoints here, which may have been copied."""
        names = [name for name in self._names(SAVERS) if name.startswith(PEER_PART)]
        return savers_of({name: self._read(SAVERS, name) or b"" for name in names}, self._marked_parts())

    @abc.abstractmethod
    def staging(self, step: int, part: str) -> Path:
        """A new local directory in which to assemble a checkpoint."""

    @abc.abstractmethod
    def send(self, staging: Path, names: Iterable[str], step: int, part: str) -> None:
        """Store these finished files of the staging directory. An earlier checkpoint of the step becomes invalid."""

    @abc.abstractmethod
    def finish(self, staging: Path, step: int, part: str) -> None:
        """Store the mark, which is in the staging directory. All other files must have been sent."""

    @abc.abstractmethod
    def discard(self, staging: Path) -> None:
        """Remove the staging directory of an unfinished checkpoint. Safe to repeat, and from two threads at once."""

    @abc.abstractmethod
    def clear(self, part: str) -> None:
        """Remove half-written checkpoints that killed workers of this peer have left."""

    @abc.abstractmethod
    def delete(self, name: str, part: str) -> None:
        """Delete a checkpoint, the mark first. Safe to repeat."""

    @abc.abstractmethod
    def opened(self, name: str, part: str) -> contextlib.AbstractContextManager[Path]:
        """A context manager that yields a local directory with the checkpoint's files."""

    @abc.abstractmethod
    def _names(self, *words: str) -> list[str]:
        """The names in a directory; [] if it does not exist."""

    @abc.abstractmethod
    def _marked_parts(self) -> list[str]:
        """The parts that have a mark in any step."""

    @abc.abstractmethod
    def _read(self, *words: str) -> bytes | None:
        """The content of a small file; None if it does not exist."""

    @abc.abstractmethod
    def _put(self, content: bytes, *words: str) -> None:
        """Write a small file, creating its directory if necessary."""

    def _marks_of(self, directories: Iterable[tuple[str, tuple[str, str]]]) -> dict[str, bytes]:
        found: Iterator[tuple[str, bytes | None]] = ((key, self.mark(*place)) for key, place in directories)
        return {key: raw for key, raw in found if raw is not None}
