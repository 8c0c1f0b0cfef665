"""Checkpoints at a URL: any file system that fsspec knows, object stores among them."""

from __future__ import annotations

import contextlib
import glob
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from diloco.checkpoint.choice import Registration
from diloco.checkpoint.dirs import STEP, own_part, step_name
from diloco.checkpoint.mark import COMPLETE, PEER_PART
from diloco.checkpoint.registration import SAVERS, registration_of, savers_of


class RemoteStore:
    """An fsspec file system. Nothing there is renamed, and a file is there once it has been written as a whole."""

    def __init__(self, url: str, filesystem: Any, root: str, scratch: Path) -> None:
        self._url, self._files, self._root, self._scratch = (
            url.rstrip("/"),
            filesystem,
            root.rstrip("/"),
            scratch,
        )

    def name_of(self, name: str, part: str) -> str:
        return "/".join(filter(None, (self._url, name, part)))

    def marks(self, part: str) -> dict[str, bytes]:
        return self._read_marks(self._pattern("model_step_*", part), lambda words: words[-1 - bool(part)])

    def parts(self, name: str) -> dict[str, bytes]:
        return self._read_marks(self._pattern(name, f"{PEER_PART}*"), lambda words: words[-1])

    def mark(self, name: str, part: str) -> bytes | None:
        with _as_os_errors(), contextlib.suppress(FileNotFoundError):
            content: bytes = self._files.cat_file(self._at(name, part, COMPLETE))
            return content
        return None

    def register(self, world_rank: int, *, has_saved: bool = False) -> None:
        path = self._at(SAVERS, own_part(world_rank))
        with _as_os_errors():
            before = None
            with contextlib.suppress(FileNotFoundError):
                before = self._files.cat_file(path)
            if has_saved or before is None:
                self._make_parent(path)
                self._files.pipe_file(path, registration_of(before, has_saved=has_saved))

    def savers(self) -> dict[int, Registration]:
        with _as_os_errors():
            self._files.invalidate_cache()
            paths = self._files.glob(self._pattern(SAVERS, f"{PEER_PART}*"))
            registered = {path.split("/")[-1]: self._files.cat_file(path) for path in paths}
            marks = self._files.glob(self._pattern("model_step_*", f"{PEER_PART}*", COMPLETE))
        return savers_of(registered, (path.split("/")[-2] for path in marks))

    def staging(self, step: int, part: str) -> Path:
        self._scratch.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{step_name(step)}-", dir=self._scratch))

    def send(self, staging: Path, names: Iterable[str], step: int, part: str) -> None:
        with _as_os_errors():
            # Without its mark, what lies there of an earlier life is no checkpoint while its files are replaced.
            self._remove(self._at(step_name(step), part, COMPLETE))
            for name in names:
                path = self._at(step_name(step), part, name)
                self._make_parent(path)
                self._files.put_file(str(staging / name), path)

    def finish(self, staging: Path, step: int, part: str) -> None:
        with _as_os_errors():
            # In one request, so whole or absent.
            path = self._at(step_name(step), part, COMPLETE)
            self._make_parent(path)
            self._files.pipe_file(path, (staging / COMPLETE).read_bytes())
        shutil.rmtree(staging, ignore_errors=True)

    def discard(self, staging: Path) -> None:
        shutil.rmtree(staging, ignore_errors=True)

    def clear(self, part: str) -> None:
        """What has been sent of a checkpoint without a mark is replaced by the next of its step."""
        for left in self._scratch.glob("model_step_*"):
            shutil.rmtree(left, ignore_errors=True)

    def delete(self, name: str, part: str) -> None:
        with _as_os_errors():
            self._remove(self._at(name, part, COMPLETE))
            files = self._own_files(name, part)
            for path in files:
                self._remove(path)
            around = {path.rpartition("/")[0] for path in files} | {self._at(name, part), self._at(name)}
            for directory in sorted(around, key=len, reverse=True):
                # Where there are directories at all; what is not empty is other peers'.
                with contextlib.suppress(OSError, NotImplementedError):
                    self._files.rmdir(directory)

    @contextlib.contextmanager
    def opened(self, name: str, part: str) -> Iterator[Path]:
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=self._scratch) as directory:
            start = len(self._at(name, part)) + 1
            with _as_os_errors():
                for path in self._own_files(name, part):
                    local = Path(directory, *path[start:].split("/"))
                    local.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(path, str(local))
            yield Path(directory)

    def _own_files(self, name: str, part: str) -> list[str]:
        """Of a checkpoint, other peers' parts left out."""
        self._files.invalidate_cache()
        root = self._at(name, part)
        return [path for path in self._files.find(root) if not path[len(root) + 1 :].startswith(PEER_PART)]

    def _read_marks(self, directories: str, key: Callable[[list[str]], str]) -> dict[str, bytes]:
        """Of all directories that match the pattern, by what `key` makes of the words of their path."""
        with _as_os_errors():
            self._files.invalidate_cache()
            found = {
                path: key(path.split("/")[:-1]) for path in self._files.glob(f"{directories}/{COMPLETE}")
            }
            return {
                name: self._files.cat_file(path)
                for path, name in found.items()
                if STEP.fullmatch(name) or name.startswith(PEER_PART)
            }

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(path)

    def _make_parent(self, path: str) -> None:
        """Where there are directories at all."""
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _pattern(self, *words: str) -> str:
        """As `_at`; only what the words say is a pattern, whatever letters the URL has."""
        return "/".join(filter(None, (glob.escape(self._root), *words)))

    def _at(self, *words: str) -> str:
        return "/".join(filter(None, (self._root, *words)))


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Whatever the library behind a URL raises, as what a disk would."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
