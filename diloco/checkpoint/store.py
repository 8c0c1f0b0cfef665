"""Where checkpoints lie: a directory, or any place that fsspec has a URL for.

A checkpoint is put together in a local directory and then given to the store. In a directory it gets its name in one
rename; elsewhere its files are sent one by one, the mark last, so that what has no mark is no checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from diloco.checkpoint.choice import Registration
from diloco.checkpoint.dirs import (
    delete,
    discard,
    marked_steps,
    move,
    own_part,
    step_name,
    temporaries_of,
    temporary_of,
)
from diloco.checkpoint.mark import COMPLETE, PEER_PART
from diloco.checkpoint.registration import SAVERS, registration_of, savers_of
from diloco.checkpoint.remote import RemoteStore
from diloco.errors import UserError
from peers.state.whole_files import write_bytes


class Store(Protocol):
    """`part` is a peer's directory within a step's, empty for a training without a swarm. All raise OSError."""

    def name_of(self, name: str, part: str) -> str:
        """Of a step's checkpoint, for people."""

    def marks(self, part: str) -> dict[str, bytes]:
        """What complete.json holds, by the step's name, of all checkpoints of a peer that have one."""

    def parts(self, name: str) -> dict[str, bytes]:
        """What complete.json holds, by part, of all peers' checkpoints of a step."""

    def mark(self, name: str, part: str) -> bytes | None:
        """What complete.json holds; None where there is none."""

    def register(self, world_rank: int, *, has_saved: bool = False) -> None:
        """This peer is going to save here, or has a checkpoint that is whole. What was said first stays."""

    def savers(self) -> dict[int, Registration]:
        """World ranks that have ever been going to save here, or whose checkpoints were brought here."""

    def staging(self, step: int, part: str) -> Path:
        """A new local directory in which a checkpoint is put together."""

    def send(self, staging: Path, names: Iterable[str], step: int, part: str) -> None:
        """Take files that are finished; what an earlier checkpoint of the step had is no longer one."""

    def finish(self, staging: Path, step: int, part: str) -> None:
        """All files but the mark have been sent, and lie with the mark in the directory: this makes the checkpoint."""

    def discard(self, staging: Path) -> None:
        """It will not be finished. Safe to repeat, and from two threads at once."""

    def clear(self, part: str) -> None:
        """Remove what killed lives of this peer have left half-written."""

    def delete(self, name: str, part: str) -> None:
        """Delete a checkpoint, the mark first. Safe to repeat."""

    def opened(self, name: str, part: str) -> contextlib.AbstractContextManager[Path]:
        """A local directory that has the checkpoint's files, for as long as the block runs."""


def open_store(path: str, scratch: Path) -> Store:
    """The store of --ckpt.path; `scratch` is a local directory for what is on its way. Raises UserError."""
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


class LocalStore:
    """A directory of this machine, which peers or nodes may share."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def name_of(self, name: str, part: str) -> str:
        return str(self._path / name / part)

    def marks(self, part: str) -> dict[str, bytes]:
        return dict(_read_marks({d: step_name(n) for n, d in marked_steps(self._path, part).items()}))

    def parts(self, name: str) -> dict[str, bytes]:
        found = (self._path / name).glob(f"{PEER_PART}*")
        return dict(_read_marks({directory: directory.name for directory in found}))

    def mark(self, name: str, part: str) -> bytes | None:
        return dict(_read_marks({self._path / name / part: name})).get(name)

    def register(self, world_rank: int, *, has_saved: bool = False) -> None:
        path = self._path / SAVERS / own_part(world_rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        if has_saved or not path.exists():
            write_bytes(
                path, registration_of(path.read_bytes() if path.exists() else None, has_saved=has_saved)
            )

    def savers(self) -> dict[int, Registration]:
        registered = {path.name: path.read_bytes() for path in (self._path / SAVERS).glob(f"{PEER_PART}*")}
        marks = self._path.glob(f"model_step_*/{PEER_PART}*/{COMPLETE}")
        return savers_of(registered, (path.parent.name for path in marks))

    def staging(self, step: int, part: str) -> Path:
        temporary = temporary_of(self._path / step_name(step) / part)
        temporary.mkdir(parents=True)
        return temporary

    def send(self, staging: Path, names: Iterable[str], step: int, part: str) -> None:
        """They lie where they belong."""

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


def _read_marks(directories: dict[Path, str]) -> Iterator[tuple[str, bytes]]:
    for directory, name in directories.items():
        try:
            yield name, (directory / COMPLETE).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            # None has been made, or it is being deleted.
            continue
        except OSError:
            # A mark that cannot be read is a damaged one.
            yield name, b""
