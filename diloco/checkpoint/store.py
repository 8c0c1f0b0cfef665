"""The place where checkpoints are kept: a directory, or a URL that fsspec supports.

<path>/model_step_<N>/[diloco_rank_<world rank>/] is a checkpoint, and <path>/savers/ says which peers save there. A
checkpoint is assembled in a staging directory on this machine and then handed to the store: a directory renames it into
place; at a URL the files are uploaded one by one, the mark last.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from diloco.checkpoint.choice import Candidate, Registration
from diloco.checkpoint.digests import are_ours
from diloco.checkpoint.mark import COMPLETE, PEER_PART, read_mark
from diloco.errors import DilocoError, UserError
from peers.state.whole_files import flush_to_disk, write_bytes

log = logging.getLogger(__name__)

STEP = re.compile(r"model_step_(\d+)")
SAVERS = "savers"
"""Directory of the registration files: each peer's first start there, and whether it has saved."""
_TEMPORARY = (".partial", ".discarded")
_AT_ONCE = 8
"""Requests to a URL at a time; s3fs keeps ten connections."""

_REFUSALS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_REFUSED = (
    errno.EDQUOT,
    errno.EINVAL,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EROFS,
)
_NOT_ASKED = ("NoCredentialsError", "ParamValidationError", "PartialCredentialsError", "ProfileNotFound")
"""Errors of botocore that it raises before it asks the store: the user's settings are wrong, or missing."""

S = TypeVar("S")
T = TypeVar("T")


def own_part(world_rank: int | None) -> str:
    return "" if world_rank is None else f"{PEER_PART}{world_rank}"


def step_name(step: int) -> str:
    return f"model_step_{step}"


def open_store(path: str, scratch: Path) -> Store:
    """The store of --ckpt.path; `scratch` is a local directory for files in transfer.

    Raises UserError if it is refused, DilocoError if it is out of reach: some file systems connect at once.
    """
    if "://" not in path:
        return Store(Path(path).expanduser())
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(path)
    except ImportError as error:
        extra = "pip install 'diloco[s3]'" if path.startswith("s3") else "install the package that it names"
        raise UserError(f"{path} needs a package that is not here ({error}): {extra}") from error
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and not is_refusal(error):
            raise DilocoError(f"{path} cannot be reached: {error}") from error
        raise UserError(f"checkpoints cannot be kept in {path}: {error}") from error
    return RemoteStore(path, filesystem, root, scratch)


def is_refusal(error: OSError) -> bool:
    """Whether a store has refused an operation, and would do so again; if not, it may only be out of reach."""
    return isinstance(error, _REFUSALS) or error.errno in _REFUSED


class Store:
    """A local directory, which several peers or nodes may share. All methods may raise OSError.

    `part` is a peer's directory within a step's, empty without a swarm. Does not use fsspec, whose directory listings
    take ten times the CPU time.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def name_of(self, name: str, part: str) -> str:
        """The path or URL of a step's checkpoint, for messages."""
        return str(self._directory / name / part)

    def marks(self, part: str) -> dict[str, bytes]:
        """The contents of complete.json of a peer's checkpoints, by step name."""
        names = [name for name in self._names() if STEP.fullmatch(name)]
        return {name: raw for (name, _), raw in self._marks([(name, part) for name in names]).items()}

    def parts(self, name: str) -> dict[str, bytes]:
        """The contents of complete.json of all peers' checkpoints of a step, by part."""
        parts = [part for part in self._names(name) if part.startswith(PEER_PART)]
        return {part: raw for (_, part), raw in self._marks([(name, part) for part in parts]).items()}

    def all_marks(self) -> dict[tuple[str, str], bytes]:
        """The contents of complete.json of all peers' checkpoints, by step name and part."""
        return self._marks(self._marked())

    def mark(self, name: str, part: str) -> bytes | None:
        """The content of complete.json; None if there is none."""
        return self._read(name, part, COMPLETE)

    def register(self, world_rank: int, *, has_saved: bool = False) -> None:
        """Record that this peer saves here, or that it has completed a checkpoint. Keeps the time of the first call."""
        file = (SAVERS, own_part(world_rank))
        before = self._read(*file)
        if has_saved or before is None:
            at_ms = time.time_ns() // 1_000_000 if before is None else _registration(before).at_ms
            self._put(json.dumps({"at_ms": at_ms, "has_saved": has_saved}).encode(), *file)

    def savers(self) -> dict[int, Registration]:
        """World ranks that have registered here, or whose checkpoints are here, perhaps copied from elsewhere."""
        names = [name for name in self._names(SAVERS) if name.startswith(PEER_PART)]
        contents = self._read_all([(SAVERS, name) for name in names])
        found = {name: _registration(raw or b"") for name, raw in zip(names, contents, strict=True)}
        saved = {part for _, part in self._marked()}
        found |= {part: replace(found.get(part, Registration()), has_saved=True) for part in saved}
        ranks = {name: name.removeprefix(PEER_PART) for name in found}
        return {int(ranks[name]): one for name, one in found.items() if ranks[name].isdecimal()}

    def staging(self, step: int, part: str) -> Path:
        """A new local directory in which to assemble a checkpoint."""
        temporary = _temporary_of(self._directory / step_name(step) / part)
        temporary.mkdir(parents=True)
        return temporary

    def send(self, staging: Path, names: Iterable[str], step: int, part: str) -> None:
        """Store these finished files of the staging directory. An earlier checkpoint of the step becomes invalid.

        Does nothing for a local directory: the staging directory is beside the final one, and `finish` renames it.
        """

    def finish(self, staging: Path, step: int, part: str) -> None:
        """Store the mark, which is in the staging directory. All other files must have been sent."""
        for name in read_mark(staging).files:
            if not (staging / name).is_file():
                raise OSError(
                    f"{name} was written on another node: --ckpt.path has to be a directory that all nodes share, "
                    "or a URL"
                )
        _move(staging, self._directory / step_name(step) / part)

    def discard(self, staging: Path) -> None:
        """Remove the staging directory of an unfinished checkpoint. Safe to repeat, and from two threads at once."""
        # Renamed first, so that neither this process nor the daemon adds files while it is being deleted.
        discarded = staging.with_name(f".{staging.name.strip('.')}.discarded")
        with contextlib.suppress(OSError):
            staging.rename(discarded)
            _delete(discarded)

    def clear(self, part: str) -> None:
        """Remove half-written checkpoints that killed workers of this peer have left."""
        # Listed before the first is deleted: several peers may clear one directory at once.
        for path in list(self._directory.glob(f"model_step_*/.{part}.*" if part else ".model_step_*")):
            if path.name.endswith(_TEMPORARY):
                _delete(path)

    def delete(self, name: str, part: str) -> None:
        """Delete a checkpoint, the mark first. Safe to repeat."""
        _delete(self._directory / name / part)

    @contextlib.contextmanager
    def opened(self, candidate: Candidate) -> Iterator[Path]:
        """A local directory with those of the checkpoint's files that exist."""
        yield self._directory / candidate.name / candidate.part

    def _names(self, *words: str) -> list[str]:
        """The names in a directory; [] if it does not exist."""
        directory = self._directory.joinpath(*words)
        return [path.name for path in directory.iterdir()] if directory.is_dir() else []

    def _marks(self, places: Sequence[tuple[str, str]]) -> dict[tuple[str, str], bytes]:
        """The contents of complete.json in these steps and parts, where there is one."""
        contents = self._read_all([(*place, COMPLETE) for place in places])
        return {place: raw for place, raw in zip(places, contents, strict=True) if raw is not None}

    def _marked(self) -> list[tuple[str, str]]:
        """Step name and part of all peers' marks."""
        found = self._directory.glob(f"model_step_*/{PEER_PART}*/{COMPLETE}")
        return [(path.parts[-3], path.parts[-2]) for path in found if STEP.fullmatch(path.parts[-3])]

    def _read_all(self, files: Sequence[tuple[str, ...]]) -> list[bytes | None]:
        """As `_read`, for many files."""
        return [self._read(*words) for words in files]

    def _read(self, *words: str) -> bytes | None:
        """The content of a small file; None if it does not exist."""
        try:
            return self._directory.joinpath(*words).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            # A file that cannot be read counts as damaged, not as missing.
            return b""

    def _put(self, content: bytes, *words: str) -> None:
        """Write a small file atomically, creating its directory if necessary."""
        path = self._directory.joinpath(*words)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)


class RemoteStore(Store):
    """On an fsspec file system. It does not rely on renames, only on single files being written atomically."""

    def __init__(self, url: str, filesystem: Any, root: str, scratch: Path) -> None:
        self._url, self._scratch = url.rstrip("/"), scratch
        self._files, self._root = filesystem, root.rstrip("/")

    def name_of(self, name: str, part: str) -> str:
        return "/".join(filter(None, (self._url, name, part)))

    def staging(self, step: int, part: str) -> Path:
        self._scratch.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{step_name(step)}-", dir=self._scratch))

    def send(self, staging: Path, names: Iterable[str], step: int, part: str) -> None:
        with _as_os_errors():
            # Without its mark, an earlier checkpoint of this step is invalid while its files are being replaced.
            self._remove(self._path(step_name(step), part, COMPLETE))
            for name in names:
                path = self._path(step_name(step), part, name)
                self._make_parent(path)
                self._files.put_file(str(staging / name), path)

    def finish(self, staging: Path, step: int, part: str) -> None:
        self._put((staging / COMPLETE).read_bytes(), step_name(step), part, COMPLETE)
        shutil.rmtree(staging, ignore_errors=True)

    def discard(self, staging: Path) -> None:
        shutil.rmtree(staging, ignore_errors=True)

    def clear(self, part: str) -> None:
        """Also removes what was uploaded without a mark. A failure of that is logged."""
        for left in self._scratch.glob("model_step_*"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            for (name, its_part), names in self._listed().items():
                # OpenDiLoCo used the same directories, without a mark.
                if its_part == part and COMPLETE not in names and are_ours(names):
                    self.delete(name, part)
        except OSError as error:
            log.error("checkpoints whose upload was cut off were not deleted: %s", error)

    def delete(self, name: str, part: str) -> None:
        with _as_os_errors():
            self._remove(self._path(name, part, COMPLETE))
            files = self._own_files(name, part)
            self._at_once(self._remove, files)
            around = {path.rpartition("/")[0] for path in files} | {self._path(name, part), self._path(name)}
            self._files.invalidate_cache()
            for directory in sorted(around, key=len, reverse=True):
                # Fails on stores without directories.
                with contextlib.suppress(OSError, NotImplementedError):
                    # On hdfs, rmdir would delete the other peers' checkpoints in the directory as well.
                    if not self._files.ls(directory, detail=False):
                        self._files.rmdir(directory)

    @contextlib.contextmanager
    def opened(self, candidate: Candidate) -> Iterator[Path]:
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{candidate.name}-", dir=self._scratch) as directory:
            self._files.invalidate_cache()

            def fetch(name: str) -> None:
                local = Path(directory, name)
                local.parent.mkdir(parents=True, exist_ok=True)
                with _as_os_errors(), contextlib.suppress(FileNotFoundError):
                    self._files.get_file(self._path(candidate.name, candidate.part, name), str(local))

            # Only what the mark lists: an earlier save of this step, by more ranks, may have left other files.
            self._at_once(fetch, (*candidate.mark.files, COMPLETE))
            yield Path(directory)

    def _own_files(self, name: str, part: str) -> list[str]:
        """Paths of a checkpoint's files, without other peers' parts."""
        self._files.invalidate_cache()
        root = self._path(name, part)
        return [path for path in self._files.find(root) if not path[len(root) + 1 :].startswith(PEER_PART)]

    def _names(self, *words: str) -> list[str]:
        with _as_os_errors(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._files.invalidate_cache()
            return [
                path.rstrip("/").rpartition("/")[2]
                for path in self._files.ls(self._path(*words), detail=False)
            ]
        return []

    def _marked(self) -> list[tuple[str, str]]:
        return [place for place, names in self._listed().items() if place[1] and COMPLETE in names]

    def _listed(self) -> dict[tuple[str, str], set[str]]:
        """The files of all checkpoints, complete or not, by step name and part."""
        paths: list[str] = []
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            # Without a depth or a pattern this is one listing, not one for each directory.
            paths = [path[len(self._root) + 1 :] for path in self._files.find(self._root)]
        found: dict[tuple[str, str], set[str]] = {}
        for path in paths:
            name, _, file = path.partition("/")
            part, _, in_part = file.partition("/") if file.startswith(PEER_PART) else ("", "", file)
            if STEP.fullmatch(name):
                found.setdefault((name, part), set()).add(in_part)
        return found

    def _read_all(self, files: Sequence[tuple[str, ...]]) -> list[bytes | None]:
        return self._at_once(lambda words: self._read(*words), files)

    def _at_once(self, work: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """The results of this work for each of the items, in order; some at a time where the file system allows it."""
        if not getattr(self._files, "async_impl", False):
            # It may have one connection, without a lock.
            return [work(item) for item in items]
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            return list(threads.map(work, items))

    def _read(self, *words: str) -> bytes | None:
        with _as_os_errors(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            content: bytes = self._files.cat_file(self._path(*words))
            return content
        return None

    def _put(self, content: bytes, *words: str) -> None:
        """One request, so the file is written atomically."""
        path = self._path(*words)
        with _as_os_errors():
            self._make_parent(path)
            self._files.pipe_file(path, content)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)

    def _make_parent(self, path: str) -> None:
        """No effect on stores without directories."""
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _path(self, *words: str) -> str:
        return "/".join(filter(None, (self._root, *words)))


def _registration(raw: bytes) -> Registration:
    """An unreadable file counts as a peer that has saved, so that it makes no other peer start from the beginning."""
    try:
        content = json.loads(raw)
        return Registration(at_ms=int(content["at_ms"]), has_saved=bool(content["has_saved"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Registration()


def _temporary_of(final: Path) -> Path:
    """A new temporary name: the daemon may still be writing to a directory left by a worker that died."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.partial")


def _move(temporary: Path, final: Path) -> None:
    """Rename the temporary directory to `final` and flush it to disk, replacing a checkpoint from before a resume."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if temporary.stat().st_dev != final.parent.stat().st_dev:
        copied = _temporary_of(final)
        shutil.copytree(temporary, copied)
        for path in [copied, *copied.rglob("*")]:
            flush_to_disk(path)
        shutil.rmtree(temporary)
        temporary = copied
    if not final.exists():
        temporary.rename(final)
    else:
        _empty(final)
        for entry in sorted(temporary.iterdir(), key=lambda entry: entry.name == COMPLETE):
            if entry.name == COMPLETE:
                flush_to_disk(final)
            entry.rename(final / entry.name)
        temporary.rmdir()
        flush_to_disk(final)
    flush_to_disk(final.parent)
    flush_to_disk(final.parent.parent)


def _delete(directory: Path) -> None:
    """Delete a checkpoint, and the step's directory if that is then empty. Safe to repeat, and from two threads."""
    _empty(directory)
    with contextlib.suppress(OSError):
        directory.rmdir()
        # In a swarm the step's directory contains those of the peers: the last peer to delete its own removes it.
        directory.parent.rmdir()


def _empty(directory: Path) -> None:
    """Delete a checkpoint's content, the mark first, but no directories of other peers in it."""
    (directory / COMPLETE).unlink(missing_ok=True)
    for entry in list(directory.iterdir()) if directory.is_dir() else []:
        if entry.name.startswith((PEER_PART, f".{PEER_PART}")):
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Convert every exception of the library behind a URL to OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        name = type(error).__name__
        raise (PermissionError if name in _NOT_ASKED else OSError)(f"{name}: {error}") from error
