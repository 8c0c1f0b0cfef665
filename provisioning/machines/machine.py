"""The protocol of a machine, local or remote: run shell scripts, copy files, follow output."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from provisioning.errors import CommandFailed

EXCLUDED = (
    ".git",
    ".venv",
    "__pycache__",
    "*.egg-info",
    "runs",
    "outputs",
    "wandb",
    "build",
    "dist",
    ".*_cache",
)
"""Patterns of files that are not sent with the code."""
MAX_OUTPUT_BYTES = 4 << 20
"""Of a script on each of its two streams. What is read of logs and records is cut to far less."""
MAX_LOG_BYTES = 8000
"""What is read of the end of a log: progress bars write lines of any length."""
BLOCK_BYTES = 1 << 16
_SHOWN_CHARACTERS = 1500
_MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Answer:
    """Exit code and output of a script."""

    code: int
    stdout: str
    stderr: str

    def checked(self, what: str) -> str:
        """The output. Raises CommandFailed, with the end of the error output, if the exit code is not 0."""
        if self.code:
            words = (self.stderr.strip() or self.stdout.strip())[-_SHOWN_CHARACTERS:]
            raise CommandFailed(f"{what} failed ({self.code}): {words or 'no output'}")
        return self.stdout


class Reader(Protocol):
    async def read(self, n: int) -> bytes:
        """At most `n` bytes; b"" at the end."""
        ...


class Writer(Protocol):
    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def write_eof(self) -> None: ...


async def exchange(stdin: Writer, content: bytes, *outputs: Awaitable[bytes]) -> list[bytes]:
    """Write `content` to a program's stdin, and read its `outputs` meanwhile. The program may end early."""

    async def write() -> bytes:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(content)
            await stdin.drain()
            stdin.write_eof()
        return b""

    tasks = [asyncio.ensure_future(one) for one in (write(), *outputs)]
    try:
        return (await asyncio.gather(*tasks))[1:]
    finally:
        for task in tasks:
            task.cancel()


async def spawned(starting: Coroutine[Any, Any, asyncio.subprocess.Process]) -> asyncio.subprocess.Process:
    """The process that `create_subprocess_exec` starts in a session of its own. If this is cancelled, the process ends.

    asyncio itself may then wait for ever, since the children of the process go on.
    """
    task = asyncio.create_task(starting)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await end(await task)
        raise


async def end(process: asyncio.subprocess.Process) -> None:
    """SIGKILL to all processes of this session, unless its leader has ended. May be repeated."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # Until its pipes are closed, `wait` does not return; asyncio offers no other way to close those that are read.
    process._transport.close()  # type: ignore[attr-defined]
    await process.wait()


async def whole(stream: Reader, where: str) -> bytes:
    """All that a script writes to this stream. Raises CommandFailed if that is too much."""
    found = bytearray()
    while block := await stream.read(BLOCK_BYTES):
        found += block
        if len(found) > MAX_OUTPUT_BYTES:
            raise CommandFailed(f"a script wrote more than {MAX_OUTPUT_BYTES >> 20} MiB on {where}")
    return bytes(found)


async def end_of_stream(stream: Reader) -> bytes:
    """The last bytes of a stream of any length."""
    found = b""
    while block := await stream.read(BLOCK_BYTES):
        found = (found + block)[-BLOCK_BYTES:]
    return found


async def lines_of(read: Callable[[], Awaitable[bytes]]) -> AsyncIterator[str]:
    """The lines of a stream; `read` returns its next bytes, b"" at its end.

    A very long line, as of a progress bar, is yielded in pieces.
    """
    rest = b""
    while block := await read():
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


class Machine(Protocol):
    """Scripts run in the home directory of the machine's user."""

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> Answer:
        """Run a POSIX shell script.

        Raises MachineError if it cannot be run, does not end in time, or writes more than MAX_OUTPUT_BYTES.
        """
        ...

    async def sync(
        self, source: Path, into: str, *, excluded: Sequence[str] = EXCLUDED, mirrors: bool = True
    ) -> None:
        """Make `into` equal to `source`, a directory or a file, modes included.

        If not `mirrors`, files that are in `into` alone are kept. May be repeated. Raises MachineError or UserError.
        """
        ...

    async def fetch(self, directory: str, paths: Sequence[str], into: Path) -> None:
        """Copy files and directories from `directory` to the same relative paths in `into`, which exists.

        Symbolic links are left out. May be repeated. Raises MachineError or UserError.
        """
        ...

    def follow(self, script: str) -> AsyncIterator[str]:
        """Yield the lines that a script writes, as they come. Raises MachineError."""
        ...

    def shell_argv(self, directory: str, ports: Sequence[int] = ()) -> list[str]:
        """A command that opens an interactive shell in that directory; valid until `close`.

        It forwards these ports of the operator's loopback to the same ports of the machine's loopback.
        """
        ...

    async def close(self) -> None:
        """May be repeated."""
        ...
