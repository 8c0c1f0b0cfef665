"""Token ids in files, read as one sequence."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diloco.errors import DilocoError

# Each mapped file holds a descriptor, of which a process often may have only 1024.
_MOST_MAPPED = 128


class TokenFiles:
    """The ids of files, one after the other: 1-D. A slice is a view, which np.asarray reads."""

    def __init__(self, files: _Files, start: int, stop: int) -> None:
        self._files, self._start, self._stop = files, start, stop

    @classmethod
    def of(cls, paths: Sequence[Path], dtype: np.dtype) -> TokenFiles:
        """All ids of the files, of which there is at least one. Raises OSError."""
        files = _Files(paths, dtype)
        return cls(files, 0, int(files.ends[-1]))

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, span: slice) -> TokenFiles:
        start, stop, _ = slice(span.start, span.stop).indices(len(self))
        return TokenFiles(self._files, self._start + start, self._start + max(start, stop))

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        ids = self._files.read(self._start, self._stop)
        return ids if dtype is None else ids.astype(dtype, copy=False)


class _Files:
    """Maps up to _MOST_MAPPED files at once; of more, each when it is first read, until that many others have been."""

    def __init__(self, paths: Sequence[Path], dtype: np.dtype) -> None:
        self.dtype = dtype
        self.ends = np.cumsum([path.stat().st_size // dtype.itemsize for path in paths], dtype=np.int64)
        self._paths = paths
        self._mapped = functools.lru_cache(_MOST_MAPPED)(lambda number: _mapped(paths[number], dtype))
        if len(paths) <= _MOST_MAPPED:
            # Then they can be read even after somebody has deleted them.
            for number in np.flatnonzero(np.diff(self.ends, prepend=0)).tolist():
                self._mapped(number)

    def read(self, start: int, stop: int) -> np.ndarray:
        ids = np.empty(stop - start, dtype=self.dtype)
        number, at = int(self.ends.searchsorted(start, side="right")), start
        while at < stop:
            first = int(self.ends[number - 1]) if number else 0
            end = min(stop, int(self.ends[number]))
            # An empty file cannot be mapped.
            if end > at:
                ids[at - start : end - start] = self._ids_of(number)[at - first : end - first]
            at, number = end, number + 1
        return ids

    def _ids_of(self, number: int) -> np.ndarray:
        try:
            return self._mapped(number)
        except OSError as error:
            path = self._paths[number]
            raise DilocoError(
                f"cannot read the tokens in {path.parent}: {error.strerror or error}; the next start tokenises again "
                f"what is missing in {path.parent.parent}"
            ) from error


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    # np.memmap takes several times as long to open a file.
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


Tokens = np.ndarray | TokenFiles
