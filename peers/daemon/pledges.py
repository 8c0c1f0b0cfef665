"""What this peer has signed, kept on disk so that it does not sign twice after a restart."""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

from peers.errors import UserError
from peers.state.whole_files import write_bytes

NUM_PLACES = 1024
"""Signatures that are remembered: a peer is never on a head again that so many of its signatures have followed."""
_PLEDGE = struct.Struct("<Q32sQ")
"""Number of the signature, from 1 on; head, zeros for none; attempt."""
_CHECK = struct.Struct("<I")
"""CRC-32 of the pledge before it: one that was cut off was not followed by a signature."""
_PLACE_BYTES = _PLEDGE.size + _CHECK.size
FILE_BYTES = NUM_PLACES * _PLACE_BYTES


class Pledges:
    """By head, the last attempt on it that was signed. Raises UserError where the file cannot be written.

    The file is a ring of places that are written over in memory that is mapped onto it: a disk that is full
    keeps no peer from signing.
    """

    def __init__(self, path: Path) -> None:
        try:
            if not path.exists() or path.stat().st_size != FILE_BYTES:
                write_bytes(path, bytes(FILE_BYTES))
            with path.open("r+b") as file:
                self._places = mmap.mmap(file.fileno(), FILE_BYTES)
        except OSError as error:
            raise UserError(f"cannot keep in {path} what this peer signs: {error}") from error
        pledges = sorted(filter(None, map(self._read, range(NUM_PLACES))))
        self._num_signed = pledges[-1][0] if pledges else 0
        self._attempts = {head.hex() if any(head) else "": attempt for _, head, attempt in pledges}

    @property
    def attempts(self) -> Mapping[str, int]:
        """Of this peer's earlier lives."""
        return self._attempts

    def add(self, head: str, attempt: int) -> None:
        """On the disk when this returns; `head`: 64 hexadecimal digits, or nothing."""
        self._num_signed += 1
        pledge = _PLEDGE.pack(self._num_signed, bytes.fromhex(head), attempt)
        start = self._num_signed % NUM_PLACES * _PLACE_BYTES
        self._places[start : start + _PLACE_BYTES] = pledge + _CHECK.pack(zlib.crc32(pledge))
        self._places.flush()

    def _read(self, place: int) -> tuple[int, bytes, int] | None:
        start = place * _PLACE_BYTES
        pledge = self._places[start : start + _PLEDGE.size]
        (check,) = _CHECK.unpack_from(self._places, start + _PLEDGE.size)
        if check != zlib.crc32(pledge) or not any(pledge):
            return None
        number, head, attempt = _PLEDGE.unpack(pledge)
        return number, head, attempt
