"""Files written atomically and hashed while they are written: safetensors, and small files of any content.

The digest is computed from memory in the same pass, so that corruption on the disk is detected later.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from blake3 import blake3
from torch import Tensor

_PART_BYTES = 1 << 20
_DIRTY_BYTES = 64 << 20
"""A file is flushed each time this much is written: a vote, which also writes, must not wait for a whole checkpoint."""
_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class FileRecord:
    """The expected size and content of a file; `digest` is BLAKE3 in hex."""

    num_bytes: int
    digest: str


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write CPU tensors, without copying, as a safetensors file. Durable on return. Raises OSError naming the file."""
    # Wide types first, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    return _written(path, (memoryview(head), *(_bytes_of(tensors[name]) for name in names)))


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write a file of this content. Durable on return. Raises OSError naming the file."""
    return _written(path, (memoryview(content),))


def record_of(path: Path) -> FileRecord:
    """The size and digest of an existing file. Raises OSError, also if it is no regular file."""
    hasher, num_bytes, buffer = blake3(), 0, bytearray(_PART_BYTES)
    with path.open("rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no regular file")
        while count := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
            num_bytes += count
    return FileRecord(num_bytes, hasher.hexdigest())


def problem_with(path: Path, expected: FileRecord) -> str | None:
    """What is wrong with a file, as words to put after its name; None: nothing."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            return f"has {num_bytes} bytes and not {expected.num_bytes}"
        if record_of(path) != expected:
            return "does not hold what was saved"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None


def flush_to_disk(path: Path) -> None:
    """Make what was written to a file (or a directory's entries) durable: fsync. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _written(path: Path, parts: Iterable[memoryview]) -> FileRecord:
    hasher, num_bytes = blake3(), 0
    with _new_file(path) as file:
        for part in parts:
            for start in range(0, len(part), _PART_BYTES):
                piece = part[start : start + _PART_BYTES]
                hasher.update(piece)
                num_bytes += file.write(piece)
                if num_bytes % _DIRTY_BYTES < len(piece):
                    _put_on_disk(file)
    return FileRecord(num_bytes, hasher.hexdigest())


def _put_on_disk(file: BinaryIO) -> None:
    """Flush the file to disk, and drop it from the page cache, where it would displace what training reads."""
    file.flush()
    os.fsync(file.fileno())
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A temporary file, which atomically replaces `path` when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            _put_on_disk(file)
        temporary.replace(path)
        flush_to_disk(path.parent)
    except OSError as error:
        # Name the file that the caller asked for, not the temporary one.
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's memory. A copy where it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
