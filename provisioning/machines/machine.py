"""What can be done on a machine, wherever it is: run a shell script, mirror a directory, follow an output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from provisioning.errors import MachineError

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
"""What is never sent along with the code."""
_SHOWN_CHARACTERS = 1500
_MAX_LINE_BYTES = 1 << 16


@dataclass(frozen=True)
class Answer:
    """What a script ended with."""

    code: int
    stdout: str
    stderr: str

    def checked(self, what: str) -> str:
        """The output, or MachineError with the script's last words."""
        if self.code:
            words = (self.stderr.strip() or self.stdout.strip())[-_SHOWN_CHARACTERS:]
            raise MachineError(f"{what} failed ({self.code}): {words or 'it said nothing'}")
        return self.stdout


async def lines_of(read: Callable[[], Awaitable[bytes]]) -> AsyncIterator[str]:
    """The lines of a stream of which `read` gives the next bytes, none at its end.

    One that goes on and on, as a progress bar's does, is given in pieces.
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
    """Paths in scripts are relative to the home directory of the user there."""

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> Answer:
        """A POSIX shell script, to its end. Raises MachineError where it cannot be run, or not in time."""
        ...

    async def sync(self, source: Path, into: str, *, excluded: Sequence[str] = EXCLUDED) -> None:
        """Make the directory `into` equal to `source`. May be repeated. Raises MachineError or UserError."""
        ...

    async def fetch(self, directory: str, paths: Sequence[str], into: Path) -> None:
        """Copy these files and directories below `directory` to the same places below `into`, which is there.

        Symbolic links are left out. May be repeated. Raises MachineError or UserError.
        """
        ...

    def follow(self, script: str) -> AsyncIterator[str]:
        """The lines that a script writes, as they come."""
        ...

    def shell_argv(self, directory: str, ports: Sequence[int] = ()) -> list[str]:
        """A command for a person's terminal, good until `close`: a shell in that directory. These ports of the
        machine's loopback are ports of this machine's loopback meanwhile."""
        ...

    async def close(self) -> None:
        """May be repeated."""
        ...
