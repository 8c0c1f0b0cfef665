"""Keeps on disk what this peer has signed, so that it does not sign twice after a restart."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path

from peers.errors import PeersError, UserError
from peers.state.whole_files import write_bytes

NUM_PLACES = 1024
"""Signatures that are remembered. A peer never returns to a head after it has signed this many others."""
_PLEDGE = struct.Struct("<Q32sQ")
"""The number of the signature, from 1 on; the head, zeros for none; the attempt."""
_CHECK = struct.Struct("<I")
"""CRC-32 of the pledge before it. If it is wrong, writing was interrupted: nothing was signed, ignore the pledge."""
_PLACE_BYTES = _PLEDGE.size + _CHECK.size
FILE_BYTES = NUM_PLACES * _PLACE_BYTES
# macOS has no fdatasync.
_flush = getattr(os, "fdatasync", os.fsync)


class Pledges:
    """For each head, the last attempt on it that was signed. Raises UserError where the file cannot be written.

    The file is a ring buffer of fixed size, overwritten in place, so that a full disk does not keep the peer from
    signing. A file system that copies on write (btrfs, ZFS) needs space for that, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if not path.exists() or path.stat().st_size != FILE_BYTES:
                write_bytes(path, bytes(FILE_BYTES))
            places = path.read_bytes()
            # Not through a memory map: if the disk is full, it fails with a signal, which ends the process.
            self._file = path.open("r+b", buffering=0)
        except OSError as error:
            raise UserError(f"cannot keep in {path} what this peer signs: {error}") from error
        pledges = sorted(filter(None, (_read(places, place) for place in range(NUM_PLACES))))
        self._num_signed = pledges[-1][0] if pledges else 0
        self.attempts = {head.hex() if any(head) else "": attempt for _, head, attempt in pledges}
        """By head, the last attempt that this peer had signed before it was started."""

    def add(self, head: str, attempt: int) -> None:
        """Write a pledge; it is on the disk when this returns. `head` has 64 hexadecimal digits, or none.

        Raises PeersError if it cannot be written. The peer must not sign then: it would sign twice after a restart.
        """
        self._num_signed += 1
        pledge = _PLEDGE.pack(self._num_signed, bytes.fromhex(head), attempt)
        start = self._num_signed % NUM_PLACES * _PLACE_BYTES
        try:
            written = os.pwrite(self._file.fileno(), pledge + _CHECK.pack(zlib.crc32(pledge)), start)
            if written < _PLACE_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _flush(self._file.fileno())
        except OSError as error:
            raise PeersError(
                f"cannot write to {self._path} what this peer signs: {error.strerror}. Without that it might sign "
                "twice after a restart; make room on that disk, then start the same command again"
            ) from error


def _read(places: bytes, place: int) -> tuple[int, bytes, int] | None:
    start = place * _PLACE_BYTES
    pledge = places[start : start + _PLEDGE.size]
    (check,) = _CHECK.unpack_from(places, start + _PLEDGE.size)
    if check != zlib.crc32(pledge) or not any(pledge):
        return None
    number, head, attempt = _PLEDGE.unpack(pledge)
    return number, head, attempt
