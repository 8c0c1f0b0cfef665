"""Checkpoints in a local directory, which several peers or nodes may share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from diloco.checkpoint.dirs import delete, discard, move, step_name, temporaries_of, temporary_of
from diloco.checkpoint.mark import COMPLETE, PEER_PART
from diloco.checkpoint.store import Store
from peers.state.whole_files import write_bytes


class LocalStore(Store):
    """Does not use fsspec, whose directory listings take ten times the CPU time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def name_of(self, name: str, part: str) -> str:
        return str(self._path / name / part)

    def staging(self, step: int, part: str) -> Path:
        temporary = temporary_of(self._path / step_name(step) / part)
        temporary.mkdir(parents=True)
        return temporary

    def send(self, staging: Path, names: Iterable[str], step: int, part: str) -> None:
        """Nothing to do: the staging directory is at the destination and `finish` renames it."""

    def finish(self, staging: Path, step: int, part: str) -> None:
        move(staging, self._path / step_name(step) / part)

    def discard(self, staging: Path) -> None:
        discard(staging)

    def clear(self, part: str) -> None:
        for temporary in temporaries_of(self._path, part):
            delete(temporary)

    def delete(self, name: str, part: str) -> None:
        delete(self._path / name / part)

    @contextlib.contextmanager
    def opened(self, name: str, part: str) -> Iterator[Path]:
        yield self._path / name / part

    def _names(self, *words: str) -> list[str]:
        directory = self._path.joinpath(*words)
        return [path.name for path in directory.iterdir()] if directory.is_dir() else []

    def _marked_parts(self) -> list[str]:
        return [path.parent.name for path in self._path.glob(f"model_step_*/{PEER_PART}*/{COMPLETE}")]

    def _read(self, *words: str) -> bytes | None:
        try:
            return self._path.joinpath(*words).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            # A file that cannot be read counts as damaged, not as missing.
            return b""

    def _put(self, content: bytes, *words: str) -> None:
        path = self._path.joinpath(*words)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
