"""Checkpoints at a URL, on any file system that fsspec supports, such as object stores."""

from __future__ import annotations

import contextlib
import glob
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from diloco.checkpoint.dirs import step_name
from diloco.checkpoint.mark import COMPLETE, PEER_PART
from diloco.checkpoint.store import Store


class RemoteStore(Store):
    """A store on an fsspec file system. It does not rely on renames, only on single files being written atomically."""

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
        """Removes local leftovers only. Files uploaded without a mark are overwritten by the next save of that step."""
        for left in self._scratch.glob("model_step_*"):
            shutil.rmtree(left, ignore_errors=True)

    def delete(self, name: str, part: str) -> None:
        with _as_os_errors():
            self._remove(self._path(name, part, COMPLETE))
            files = self._own_files(name, part)
            for path in files:
                self._remove(path)
            around = {path.rpartition("/")[0] for path in files} | {self._path(name, part), self._path(name)}
            for directory in sorted(around, key=len, reverse=True):
                # Fails on stores without directories, and on directories that still hold other peers' checkpoints.
                with contextlib.suppress(OSError, NotImplementedError):
                    self._files.rmdir(directory)

    @contextlib.contextmanager
    def opened(self, name: str, part: str) -> Iterator[Path]:
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self._scratch) as directory:
            start = len(self._path(name, part)) + 1
            with _as_os_errors():
                for path in self._own_files(name, part):
                    local = Path(directory, *path[start:].split("/"))
                    local.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(path, str(local))
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

    def _marked_parts(self) -> list[str]:
        with _as_os_errors():
            # The URL itself may contain characters that glob would interpret.
            pattern = f"{glob.escape(self._root)}/model_step_*/{PEER_PART}*/{COMPLETE}"
            return [path.split("/")[-2] for path in self._files.glob(pattern)]

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


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Convert every exception of the library behind a URL to OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
