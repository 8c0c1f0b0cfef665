"""Fetches results before a pod is given back: logs, metrics, the final model, and further paths."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import re
import secrets
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from provisioning.errors import MachineError, UserError
from provisioning.machines.machine import Machine
from provisioning.machines.paths import JOBS, pod_directory

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_KINDS = {
    "logs": (f"{JOBS}/*/log", "runs/*/logs", "experiments/*/logs"),
    "metrics": tuple(
        f"{runs}/*/{name}" for runs in ("runs", "experiments") for name in ("metrics.jsonl", "config.toml")
    ),
    "model": ("runs/*/model", "experiments/*/model"),
}
_SMALL = ("logs", "metrics")
DEFAULT, NOTHING = (*_SMALL, "model"), "none"


def patterns_of(words: Sequence[str]) -> list[str]:
    """Glob patterns, relative to a pod's directory. Raises UserError if a word is neither a kind nor a path."""
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


async def fetch_results(
    machine: Machine,
    label: str,
    words: Sequence[str],
    into: str,
    transfers: asyncio.Semaphore,
    limit_s: float | None = None,
) -> str:
    """Copy results to the same relative paths in `into`, a local directory or a URL that fsspec knows.

    `words`: those of --fetch, kinds and paths. `transfers` is held for logs and metrics, and then for the rest: it is
    fair, so that the small results of all pods precede the first model. `limit_s`: for how long it is held at once,
    before TimeoutError is raised. Returns a sentence on what was there. May be repeated. Raises MachineError or
    UserError.
    """
    patterns, directory = patterns_of(words), pod_directory(label)
    if not patterns:
        return "nothing of it is fetched"
    script = f"""
cd {shlex.quote(directory)} || exit 9
for path in {" ".join(patterns)}; do [ -e "$path" ] && [ ! -L "$path" ] && printf '%s\\n' "$path"; done
exit 0
"""
    listed = (await machine.run(script)).checked("looking for its results").splitlines()
    # Do not trust the pod to list only what was asked for.
    paths = [path for path in listed if ".." not in PurePosixPath(path).parts and _is_one_of(path, patterns)]
    kinds = [word for word in words if word != NOTHING]
    found = [word for word in kinds if any(_is_one_of(path, patterns_of([word])) for path in paths)]
    lacks = " or ".join(word for word in kinds if word not in found)
    if not paths:
        return f"it has no {lacks}"
    if is_url(into):
        # Fail now if the URL cannot be opened, before everything is copied here.
        _opened(into)
    with contextlib.ExitStack() as stack:
        try:
            temporary = tempfile.TemporaryDirectory(prefix="diloco-results-") if is_url(into) else None
            here = Path(stack.enter_context(temporary) if temporary else into)
            here.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"its results cannot be stored in {into}: {error.strerror}.") from error
        small = [path for path in paths if _is_one_of(path, patterns_of(_SMALL))]
        for part in (small, [path for path in paths if path not in small]):
            if part:
                async with transfers, asyncio.timeout(limit_s):
                    await machine.fetch(directory, part, here)
                    if is_url(into):
                        await asyncio.to_thread(_put, here, into)
    return f"its results are in {into}: {', '.join(found)}{f', no {lacks}' if lacks else ''}"


def is_url(place: str) -> bool:
    return "://" in place


def check_place(place: str) -> None:
    """Write and remove a file in this directory or at this URL. Raises UserError if that fails.

    Called before anything is rented, so that the results of a paid training can be stored.
    """
    try:
        if is_url(place):
            there, root = _opened(place)
            path = f"{root.rstrip('/')}/diloco-{secrets.token_hex(4)}"
            there.makedirs(root, exist_ok=True)
            there.pipe_file(path, b"written to see whether results can be kept here")
            there.rm_file(path)
        else:
            _check_directory(Path(place))
    except UserError:
        raise
    except Exception as error:
        # fsspec's file systems raise exceptions of many libraries.
        raise UserError(
            f"No results can be written to {place}: {type(error).__name__}: {error}. Name another --run-dir."
        ) from error


def _check_directory(path: Path) -> None:
    """Check that files can be written to `path`, and remove directories made for the check. Raises OSError."""
    new = [one for one in (path, *path.parents) if not one.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    finally:
        for one in new:
            with contextlib.suppress(OSError):
                one.rmdir()


def _opened(url: str) -> tuple[AbstractFileSystem, str]:
    """The file system of `url`, and the path there. Raises UserError."""
    import fsspec

    try:
        found: tuple[AbstractFileSystem, str] = fsspec.core.url_to_fs(url)
        return found
    except ImportError as error:
        extra = "pip install 'diloco[s3]'" if url.startswith("s3") else "install the package that it names"
        raise UserError(f"{url} needs a package that is not here ({error}): {extra}.") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{url} is no place for results: {error}. Name another --run-dir.") from error


def _put(source: Path, url: str) -> None:
    """Upload all files in `source` to the same relative paths below `url`. Raises UserError or MachineError."""
    there, root = _opened(url)
    try:
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            target = f"{root.rstrip('/')}/{path.relative_to(source).as_posix()}"
            there.makedirs(target.rpartition("/")[0], exist_ok=True)
            there.put_file(str(path), target)
    except Exception as error:
        # fsspec's file systems raise exceptions of many libraries.
        raise MachineError(f"{url} does not accept its results: {type(error).__name__}: {error}") from error


def _is_one_of(path: str, patterns: Sequence[str]) -> bool:
    parts = PurePosixPath(path).parts
    return any(
        len(parts) == len(wanted := PurePosixPath(pattern).parts)
        and all(map(fnmatch.fnmatchcase, parts, wanted))
        for pattern in patterns
    )
