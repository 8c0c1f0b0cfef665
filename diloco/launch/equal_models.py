"""Stores weights that several peers on this machine have saved identically only once."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peers.system import num_cores

_WEIGHTS = Path("model", "model.safetensors")


def link_equal_weights(run_dirs: Sequence[Path]) -> None:
    """Replace the weights of final models by hard links to those of an earlier directory that hold the same bytes.

    Files that cannot be read or linked stay as they are. Safe to repeat.
    """
    found = [path for directory in run_dirs if (path := directory / _WEIGHTS).is_file()]
    sizes = Counter(path.stat().st_size for path in found)
    paths = [path for path in found if sizes[path.stat().st_size] > 1]
    with ThreadPoolExecutor(num_cores()) as pool:
        digests = list(pool.map(_digest, paths))
    first: dict[bytes, Path] = {}
    for path, digest in zip(paths, digests, strict=True):
        if digest is not None:
            _link(first.setdefault(digest, path), path)


def _digest(path: Path) -> bytes | None:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
    return None


def _link(source: Path, path: Path) -> None:
    """Replace `path` atomically by a link to `source`, if the file system has links."""
    temporary = path.with_name(f".{path.name}.link")
    with contextlib.suppress(OSError):
        # Renaming one link of a file to another would do nothing, and leave the temporary one.
        if not source.samefile(path):
            temporary.unlink(missing_ok=True)
            temporary.hardlink_to(source)
            temporary.replace(path)
