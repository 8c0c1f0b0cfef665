"""Reads what is appended to the log of a process."""

from __future__ import annotations

from pathlib import Path

from diloco.train.run_dir import last_words


class LogTail:
    """Reads the part of a log that is written after this object is created.

    Processes append to their logs, so a log may begin with the output of an earlier run in the same directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = self._offset = path.stat().st_size if path.exists() else 0
        self._partial_line = b""

    def read(self) -> bytes:
        """The bytes appended since the last call."""
        if not self.path.exists():
            return b""
        with self.path.open("rb") as log:
            log.seek(self._offset)
            new = log.read()
        self._offset += len(new)
        return new

    def read_lines(self) -> list[str]:
        """The lines completed since the last call."""
        *lines, self._partial_line = (self._partial_line + self.read()).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def last_words(self) -> str:
        """The last framed message since this object was created if there is one, else the last lines."""
        return last_words(self.path, since=self._start)
