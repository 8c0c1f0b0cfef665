"""What can be done on a machine, wherever it is: run a shell script, mirror a directory, follow an output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
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


class Machine(Protocol):
    """Paths in scripts are relative to the home directory of the user there."""

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> Answer:
        """A POSIX shell script, to its end. Raises MachineError where it cannot be run, or not in time."""
        ...

    async def sync(self, source: Path, into: str, *, excluded: Sequence[str] = EXCLUDED) -> None:
        """Make the directory `into` equal to `source`. May be repeated. Raises MachineError or UserError."""
        ...

    def follow(self, script: str) -> AsyncIterator[str]:
        """The lines that a script writes, as they come."""
        ...

    def shell_argv(self, directory: str) -> list[str]:
        """A command for a person's terminal: a shell in that directory."""
        ...

    async def close(self) -> None:
        """May be repeated."""
        ...
