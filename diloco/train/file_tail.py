"""Reads what is appended to a file, such as the log of a process."""

from __future__ import annotations

from pathlib import Path

from diloco.train.run_dir import last_words


class FileTail:
    """Reads the part of a file that is written after this object is created; with `from_start`, all of it.

    Processes append to their logs, so a log may begin with the output of an earlier run in the same directory. The file
    may be missing, and if it becomes shorter it is read from its start.
    """

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self.path = path
        self._start = path.stat().st_size if not from_start and path.exists() else 0
        self._offset = self._start
        self._partial_line = b""

    def read(self) -> bytes:
        """The bytes appended since the last call."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._start = self._offset = 0
                    self._partial_line = b""
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return b""
        self._offset += len(new)
        return new

    def read_lines(self) -> list[str]:
        """The lines completed since the last call."""
        new = self.read()
        *lines, self._partial_line = (self._partial_line + new).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def last_words(self) -> str:
        """The last framed message since this object was created if there is one, else the last lines."""
        return last_words(self.path, since=self._start)
