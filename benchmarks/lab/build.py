"""Compiles the switch on first use, into a cache directory named after the sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent / "switch"
_FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra")
_TIMEOUT_S = 60.0


class LabError(RuntimeError):
    """The laboratory is not available on this machine, or a command failed."""


def switch_program() -> Path:
    """The path of the switch, compiled if necessary. Safe to call concurrently. Raises LabError without a compiler."""
    sources = sorted(_SOURCES.iterdir())
    digest = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in sources)).hexdigest()
    program = _cache_directory() / f"switch-{digest[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as directory:
            built = Path(directory) / "switch"
            _compile([path for path in sources if path.suffix == ".c"], built)
            built.replace(program)
    return program


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def _compile(sources: list[Path], program: Path) -> None:
    found = compiler()
    if found is None:
        raise LabError("the network laboratory needs a C compiler: install gcc, or name one in CC")
    argv = [found, *_FLAGS, "-o", str(program), *map(str, sources)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise LabError(f"{' '.join(argv)} failed:\n{done.stderr}")


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "diloco" / "lab"
