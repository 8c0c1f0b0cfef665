"""What this peer has signed, kept on disk so that it does not sign twice after a restart."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from peers.whole_files import write_bytes

MAX_HEADS = 64
"""A peer is never on a head again that so many others have followed."""


class Pledges:
    """By head, the last attempt on it that was signed. One file, written whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._attempts = path, dict[str, int]()
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            # A damaged file is worth no more than none.
            kept = json.loads(path.read_text())
            self._attempts = {str(head): int(attempt) for head, attempt in kept.items()}

    @property
    def attempts(self) -> Mapping[str, int]:
        return dict(self._attempts)

    def add(self, head: str, attempt: int) -> None:
        """Written when this returns. Raises OSError."""
        self._attempts.pop(head, None)
        self._attempts[head] = attempt
        while len(self._attempts) > MAX_HEADS:
            del self._attempts[next(iter(self._attempts))]
        write_bytes(self._path, json.dumps(self._attempts).encode())
