"""rsync to and from a machine: told by argv, and its exit codes in words."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from provisioning.errors import MachineError

_TIMEOUT_S = 1800.0
_NO_SPACE = "No space left on device"
_CANNOT_WRITE = 11
# A file that was removed while the others were copied.
_VANISHED = 24
# The words of a receiver that fails are sometimes lost, while ssh ends.
_MAX_TRIES = 3


def mirror_argv(source: Path, target: str, excluded: Sequence[str], shell: str) -> list[str]:
    """Makes `target` equal to `source`; no shell of ours in between."""
    excludes = [f"--exclude={pattern}" for pattern in excluded]
    return ["rsync", "-az", "--delete", *excludes, "-e", shell, "--", f"{source}/", target]


def fetch_argv(source: str, into: Path, shell: str) -> list[str]:
    """Copies what is named on its stdin: files and directories, no links."""
    return ["rsync", "-rtz", "--files-from=-", "-e", shell, "--", source, f"{into}/"]


async def run_rsync(argv: Sequence[str], what: str, where: str, stdin: bytes = b"") -> None:
    """To its end. Raises MachineError; `what` was done, and `where`, as people are told of it."""
    for number in range(1, _MAX_TRIES + 1):
        code, said = await _run(argv, what, stdin)
        if code in (0, _VANISHED):
            return
        if said.strip() or number == _MAX_TRIES:
            raise MachineError(_trouble(code, said, what, where))


async def _run(argv: Sequence[str], what: str, stdin: bytes) -> tuple[int, str]:
    """Its exit code and its errors."""
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
