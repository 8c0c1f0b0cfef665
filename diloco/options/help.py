"""Prints `--help` from pages that `make docs` has written to diloco/help/, without importing any command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAGES_DIR = Path(__file__).parents[1] / "help"
HELP_FLAGS = ("--help", "-h", "--help-all")


def page_path(words: Sequence[str], *, everything: bool = False) -> Path:
    """The file of a verb's help page. A verb with few flags has no separate `.all` page."""
    name = "_".join(words) or "diloco"
    return PAGES_DIR / f"{name}{'.all' if everything else ''}.txt"


def asked_for(argv: Sequence[str]) -> str | None:
    """The page that a command line asks for; None if it does not ask for help, or names no known verb."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    if not any(word in HELP_FLAGS for word in own):
        return None
    verb, rest = known_verb(own)
    if _is_group(verb) and rest and not rest[0].startswith("-"):
        return None
    return page_of(verb, everything="--help-all" in own)


def page_of(verb: Sequence[str], *, everything: bool = False) -> str:
    path = page_path(verb, everything=everything)
    return (path if path.is_file() else page_path(verb)).read_text(encoding="utf-8")


def known_verb(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that name a verb, and the remaining arguments."""
    number = 0
    while number < len(argv) and page_path(argv[: number + 1]).is_file():
        number += 1
    return list(argv[:number]), list(argv[number:])


def _is_group(verb: Sequence[str]) -> bool:
    """Whether the page lists verbs rather than flags."""
    return not verb or any(PAGES_DIR.glob(f"{'_'.join(verb)}_*.txt"))
