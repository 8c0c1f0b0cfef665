"""rsync to a machine: told by argv, watched while it works, and its exit codes in words."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from provisioning.errors import MachineError
from provisioning.machines import OnShare

_TIMEOUT_S = 1800.0
_NO_SPACE = "No space left on device"
_CANNOT_WRITE = 11
# The words of a receiver that fails are sometimes lost, while ssh ends.
_MAX_TRIES = 3


async def mirrored(
    source: Path, target: str, excluded: Sequence[str], *, shell: str, where: str, on_share: OnShare | None
) -> None:
    """Make `target` (user@host:path/) equal to `source`. `shell`: the ssh to use. Raises MachineError."""
    argv = rsync_argv(source, target, excluded, shell)
    if on_share and _tells_progress():
        argv[1:1] = ["--info=progress2", "--no-inc-recursive", "--outbuf=N"]
    for number in range(1, _MAX_TRIES + 1):
        code, said = await _run(argv, where, on_share)
        if code == 0:
            return
        if said.strip() or number == _MAX_TRIES:
            raise MachineError(_trouble(code, said, where))


def rsync_argv(source: Path, target: str, excluded: Sequence[str], shell: str) -> list[str]:
    """No shell of ours in between."""
    excludes = [f"--exclude={pattern}" for pattern in excluded]
    return ["rsync", "-az", "--delete", *excludes, "-e", shell, "--", f"{source}/", target]


async def _run(argv: Sequence[str], where: str, on_share: OnShare | None) -> tuple[int, str]:
    """Its exit code and its errors."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said = await asyncio.wait_for(_watched(process, on_share), _TIMEOUT_S)
    except TimeoutError as error:
        raise MachineError(f"sending the code to {where} took over {_TIMEOUT_S:g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, said.decode(errors="replace")


async def _watched(process: asyncio.subprocess.Process, on_share: OnShare | None) -> bytes:
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read())
    while block := await process.stdout.read(4096):
        if on_share and (found := re.findall(rb"(\d+)%", block)):
            on_share(int(found[-1]) / 100)
    await process.wait()
    return await errors


def _tells_progress() -> bool:
    """Whether the rsync here can: a Mac's own cannot."""
    answer = subprocess.run(["rsync", "--version"], capture_output=True, text=True, timeout=10.0, check=False)
    return re.match(r"rsync +version [3-9]", answer.stdout) is not None


def _trouble(code: int, said: str, where: str) -> str:
    if _NO_SPACE in said:
        return f"the disk of {where} is full; take a larger machine or volume"
    if code in (12, 127) and ("rsync: not found" in said or "command not found" in said):
        return f"there is no rsync on {where}; take an image that has it"
    if code == _CANNOT_WRITE and not said.strip():
        return f"files could not be written on {where}; is its disk full?"
    return f"sending the code to {where} failed ({code}): {said.strip()[-600:]}"
