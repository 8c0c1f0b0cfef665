"""Prints `--help` from pages that `make docs` has written to diloco/help/, without importing any command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAGES_DIR = Path(__file__).parents[1] / "help"
HELP_FLAGS = ("--help", "-h", "--help-all")


def page_path(words: Sequence[str], *, everything: bool = False) -> Path:
    """The file of a command's help page. A command with few flags has no separate `.all` page."""
    name = "_".join(words) or "diloco"
    return PAGES_DIR / f"{name}{'.all' if everything else ''}.txt"


def requested_page(argv: Sequence[str]) -> str | None:
    """The page that a command line requests; None without a help flag, or for an unknown command."""
    # Arguments after `--` belong to another program.
    own = argv[: argv.index("--")] if "--" in argv else argv
    if not any(word in HELP_FLAGS for word in own):
        return None
    command, rest = split_command(own)
    if _is_group(command) and rest and not rest[0].startswith("-"):
        return None
    return read_page(command, everything="--help-all" in own)


def read_page(command: Sequence[str], *, everything: bool = False) -> str:
    path = page_path(command, everything=everything)
    return (path if path.is_file() else page_path(command)).read_text(encoding="utf-8")


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that name a command, and the remaining arguments."""
    number = 0
    while number < len(argv) and page_path(argv[: number + 1]).is_file():
        number += 1
    return list(argv[:number]), list(argv[number:])


def _is_group(command: Sequence[str]) -> bool:
    """Whether the words name a group of commands rather than a command."""
    return not command or any(PAGES_DIR.glob(f"{'_'.join(command)}_*.txt"))
