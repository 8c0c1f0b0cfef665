"""What this peer has signed, kept on disk so that it does not sign twice after a restart."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from peers.whole_files import write_bytes

MAX_HEADS = 64
"""A peer is never on a head again that so many others have followed."""
_MOST_LINES = 16 * MAX_HEADS


class Pledges:
    """By head, the last attempt on it that was signed: one line of JSON for each signature.

    A round waits for each line to be on the disk, so it is only appended; the file is written anew now and then.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._attempts = path, dict[str, int]()
        self._num_lines = _MOST_LINES
        with contextlib.suppress(OSError):
            for line in path.read_text(errors="replace").splitlines():
                # A line that was cut off was not followed by a signature.
                with contextlib.suppress(ValueError, TypeError):
                    head, attempt = json.loads(line)
                    self._note(str(head), int(attempt))

    @property
    def attempts(self) -> Mapping[str, int]:
        return dict(self._attempts)

    def add(self, head: str, attempt: int) -> None:
        """On the disk when this returns. Raises OSError."""
        self._note(head, attempt)
        if self._num_lines >= _MOST_LINES:
            lines = [json.dumps(pledge) + "\n" for pledge in self._attempts.items()]
            write_bytes(self._path, "".join(lines).encode())
            self._num_lines = len(lines)
            return
        with self._path.open("ab") as file:
            file.write(json.dumps([head, attempt]).encode() + b"\n")
            file.flush()
            os.fdatasync(file.fileno())
        self._num_lines += 1

    def _note(self, head: str, attempt: int) -> None:
        self._attempts.pop(head, None)
        self._attempts[head] = attempt
        while len(self._attempts) > MAX_HEADS:
            del self._attempts[next(iter(self._attempts))]
