"""What is brought home from a pod before it is given back: logs, metrics, the final model, and what else was named."""

from __future__ import annotations

import asyncio
import fnmatch
import re
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from provisioning.errors import MachineError, UserError
from provisioning.machines.machine import Machine
from provisioning.machines.paths import JOBS, pod_directory

_KINDS = {
    "logs": (f"{JOBS}/*/log", "runs/*/logs", "experiments/*/logs"),
    "metrics": tuple(
        f"{runs}/*/{name}" for runs in ("runs", "experiments") for name in ("metrics.jsonl", "config.toml")
    ),
    "model": ("runs/*/model", "experiments/*/model"),
}
DEFAULT, NOTHING = ("logs", "metrics", "model"), "none"


def patterns_of(words: Sequence[str]) -> list[str]:
    """Paths below a pod's directory, with * in them. Raises UserError for a word that is neither a kind nor a path."""
    found: list[str] = []
    for word in words:
        if word == NOTHING:
            continue
        if word in _KINDS:
            found += _KINDS[word]
        elif re.fullmatch(r"[A-Za-z0-9._*][A-Za-z0-9._*/-]*", word) and ".." not in PurePosixPath(word).parts:
            found.append(word.rstrip("/"))
        else:
            raise UserError(
                f'--fetch "{word}" is neither {", ".join(_KINDS)} or {NOTHING}, nor a path below a pod\'s directory.'
            )
    return found


async def fetch_results(machine: Machine, label: str, words: Sequence[str], into: str) -> int:
    """Copy them to the same places below `into`, a directory here or a URL that fsspec knows; how many were there.

    May be repeated. Raises MachineError, UserError.
    """
    patterns, directory = patterns_of(words), pod_directory(label)
    if not patterns:
        return 0
    script = f"""
cd {shlex.quote(directory)} || exit 9
for path in {" ".join(patterns)}; do [ -e "$path" ] && [ ! -L "$path" ] && printf '%s\\n' "$path"; done
exit 0
"""
    listed = (await machine.run(script)).checked("looking for its results").splitlines()
    # A pod is not trusted to name only what it was asked for.
    paths = [path for path in listed if ".." not in PurePosixPath(path).parts and _is_one_of(path, patterns)]
    if paths and is_url(into):
        with tempfile.TemporaryDirectory(prefix="diloco-results-") as here:
            await machine.fetch(directory, paths, Path(here))
            await asyncio.to_thread(_put, Path(here), into)
    elif paths:
        try:
            Path(into).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{into}, where its results go, cannot be made: {error.strerror}.") from error
        await machine.fetch(directory, paths, Path(into))
    return len(paths)


def is_url(place: str) -> bool:
    return "://" in place


def _put(source: Path, url: str) -> None:
    """All files below `source` to the same places below `url`. Raises MachineError."""
    import fsspec

    try:
        there, root = fsspec.core.url_to_fs(url)
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            target = f"{root.rstrip('/')}/{path.relative_to(source).as_posix()}"
            there.makedirs(target.rpartition("/")[0], exist_ok=True)
            there.put_file(str(path), target)
    except Exception as error:
        # Each of its libraries has errors of its own.
        raise MachineError(f"{url} does not take its results: {type(error).__name__}: {error}") from error


def _is_one_of(path: str, patterns: Sequence[str]) -> bool:
    parts = PurePosixPath(path).parts
    return any(
        len(parts) == len(wanted := PurePosixPath(pattern).parts)
        and all(map(fnmatch.fnmatchcase, parts, wanted))
        for pattern in patterns
    )
