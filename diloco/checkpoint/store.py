"""Where checkpoints lie: a directory, or any place that fsspec has a URL for.

A checkpoint is put together in a local directory and then given to the store. In a directory it gets its name in one
rename; elsewhere its files are sent one by one, the mark last, so that what has no mark is no checkpoint.
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
from diloco.errors import UserError


class Store(abc.ABC):
    """`part` is a peer's directory within a step's, empty for a training without a swarm. All raise OSError."""

    @abc.abstractmethod
    def name_of(self, name: str, part: str) -> str:
        """Of a step's checkpoint, for people."""

    def marks(self, part: str) -> dict[str, bytes]:
        """What complete.json holds, by the step's name, of all checkpoints of a peer that have one."""
        return self._marks_of((name, (name, part)) for name in self._names() if STEP.fullmatch(name))

    def parts(self, name: str) -> dict[str, bytes]:
        """What complete.json holds, by part, of all peers' checkpoints of a step."""
        return self._marks_of(
            (part, (name, part)) for part in self._names(name) if part.startswith(PEER_PART)
        )

    def mark(self, name: str, part: str) -> bytes | None:
        """What complete.json holds; None where there is none."""
        return self._read(name, part, COMPLETE)

    def register(self, world_rank: int, *, has_saved: bool = False) -> None:
        """This peer is going to save here, or has a checkpoint that is whole. What was said first stays."""
        file = (SAVERS, own_part(world_rank))
        before = self._read(*file)
        if has_saved or before is None:
            self._put(registration_of(before, has_saved=has_saved), *file)

    def savers(self) -> dict[int, Registration]:
        """World ranks that have ever been going to save here, or whose checkpoints were brought here."""
        names = [name for name in self._names(SAVERS) if name.startswith(PEER_PART)]
        return savers_of({name: self._read(SAVERS, name) or b"" for name in names}, self._marked_parts())

    @abc.abstractmethod
    def staging(self, step: int, part: str) -> Path:
        """A new local directory in which a checkpoint is put together."""

    @abc.abstractmethod
    def send(self, staging: Path, names: Iterable[str], step: int, part: str) -> None:
        """Take files that are finished; what an earlier checkpoint of the step had is no longer one."""

    @abc.abstractmethod
    def finish(self, staging: Path, step: int, part: str) -> None:
        """All files but the mark have been sent, and lie with the mark in the directory: this makes the checkpoint."""

    @abc.abstractmethod
    def discard(self, staging: Path) -> None:
        """It will not be finished. Safe to repeat, and from two threads at once."""

    @abc.abstractmethod
    def clear(self, part: str) -> None:
        """Remove what killed lives of this peer have left half-written."""

    @abc.abstractmethod
    def delete(self, name: str, part: str) -> None:
        """Delete a checkpoint, the mark first. Safe to repeat."""

    @abc.abstractmethod
    def opened(self, name: str, part: str) -> contextlib.AbstractContextManager[Path]:
        """A local directory that has the checkpoint's files, for as long as the block runs."""

    @abc.abstractmethod
    def _names(self, *words: str) -> list[str]:
        """What lies in a directory; nothing where there is none."""

    @abc.abstractmethod
    def _marked_parts(self) -> list[str]:
        """The parts that have a mark, in whatever step."""

    @abc.abstractmethod
    def _read(self, *words: str) -> bytes | None:
        """What a small file holds; None where there is none."""

    @abc.abstractmethod
    def _put(self, content: bytes, *words: str) -> None:
        """Write a small file, in a directory that need not be there."""

    def _marks_of(self, directories: Iterable[tuple[str, tuple[str, str]]]) -> dict[str, bytes]:
        found: Iterator[tuple[str, bytes | None]] = ((key, self.mark(*place)) for key, place in directories)
        return {key: raw for key, raw in found if raw is not None}


def open_store(path: str, scratch: Path) -> Store:
    """The store of --ckpt.path; `scratch` is a local directory for what is on its way. Raises UserError."""
    # Both build on this module.
    from diloco.checkpoint.local import LocalStore
    from diloco.checkpoint.remote import RemoteStore

    if "://" not in path:
        return LocalStore(Path(path).expanduser())
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(path)
    except ImportError as error:
        extra = "pip install 'diloco[s3]'" if path.startswith("s3") else "install the package that it names"
        raise UserError(f"{path} needs a package that is not here ({error}): {extra}") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is no place for checkpoints: {error}") from error
    return RemoteStore(path, filesystem, root, scratch)
