"""Command lines of rsync, and error messages for its failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from provisioning.errors import MachineError

_TIMEOUT_S = 1800.0
_NO_SPACE = "No space left on device"
_CANNOT_WRITE = 11
# Exit code: a file was removed while rsync ran.
_VANISHED = 24
# The error output of a failing remote rsync is sometimes lost when ssh ends.
_MAX_TRIES = 3


def mirror_argv(source: Path, target: str, excluded: Sequence[str], shell: str) -> list[str]:
    """Makes the remote `target` equal to `source`, a directory or a file. `shell`: the ssh command line."""
    excludes = [f"--exclude={pattern}" for pattern in excluded]
    # Slashes mean what is in the directories. A file that is a link is sent as what it leads to.
    paths = [f"{source}/", f"{target}/"] if source.is_dir() else [str(source.resolve()), target]
    return ["rsync", "-az", "--delete", *excludes, "-e", shell, "--", *paths]


def fetch_argv(source: str, into: Path, shell: str) -> list[str]:
    """Copies the files and directories that are named on stdin, without symbolic links."""
    return ["rsync", "-rtz", "--files-from=-", "-e", shell, "--", source, f"{into}/"]


async def run_rsync(argv: Sequence[str], what: str, where: str, stdin: bytes = b"") -> None:
    """Run rsync. Raises MachineError if it fails. `what` and `where` describe the work in its message."""
    for number in range(1, _MAX_TRIES + 1):
        code, said = await _run(argv, what, stdin)
        if code in (0, _VANISHED):
            return
        if said.strip() or number == _MAX_TRIES:
            raise MachineError(_trouble(code, said, what, where))


async def _run(argv: Sequence[str], what: str, stdin: bytes) -> tuple[int, str]:
    """The exit code, and the error output."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(stdin), _TIMEOUT_S)
    except TimeoutError as error:
        raise MachineError(f"{what} took over {_TIMEOUT_S:g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, said.decode(errors="replace")


def _trouble(code: int, said: str, what: str, where: str) -> str:
    if _NO_SPACE in said and not what.startswith("fetching"):
        return f"the disk of {where} is full; take a larger machine or volume"
    if code in (12, 127) and ("rsync: not found" in said or "command not found" in said):
        return f"there is no rsync on {where}; take an image that has it"
    if code == _CANNOT_WRITE and not said.strip():
        return f"files could not be written on {where}; is its disk full?"
    return f"{what} failed ({code}): {said.strip()[-600:]}"
