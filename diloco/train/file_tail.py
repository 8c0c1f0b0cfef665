"""Reads what is appended to a file, such as the log of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from diloco.train.run_dir import last_words

_BLOCK_BYTES = 1 << 18
"""A file may be much larger than what is kept of it."""


class FileTail:
    """Reads the part of a file that is written after this object is created, or all behind the offset `start`.

    Processes append to their logs, so a log may begin with the output of an earlier run in the same directory. The file
    may be missing, and if it becomes shorter, by more than an incomplete last line, it is read from its start.
    """

    def __init__(self, path: Path, *, start: int | None = None) -> None:
        self.path = path
        self._start = start if start is not None else path.stat().st_size if path.exists() else 0
        self._offset = self._start
        self._partial_line = b""

    def read(self, max_bytes: int = -1) -> bytes:
        """The bytes appended since the last call, or the first of them."""
        try:
            with self.path.open("rb") as file:
                if (size := file.seek(0, 2)) < self._offset:
                    if size < (whole := self._offset - len(self._partial_line)):
                        self._start = whole = 0
                    self._offset, self._partial_line = whole, b""
                file.seek(self._offset)
                new = file.read(max_bytes)
        except OSError:
            return b""
        self._offset += len(new)
        return new

    def lines(self) -> Iterator[str]:
        """Yields the lines completed since the last call."""
        while new := self.read(_BLOCK_BYTES):
            *lines, self._partial_line = (self._partial_line + new).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")

    def read_lines(self) -> list[str]:
        """The lines completed since the last call."""
        return list(self.lines())

    def last_words(self) -> str:
        """The last framed message since this object was created if there is one, else the last lines."""
        return last_words(self.path, since=self._start)
