"""The blocks and commands of README.md, CONTRIBUTING.md and docs/, and how each of them is tested.

A block of commands under `<!-- test: parsed -->` is for machines that tests do not have (GPUs, clouds, several nodes):
the real parser reads it, and nothing is run. Every other command is run by a test, as typed.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT

README, CONTRIBUTING = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")
)
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
BIN = Path(sys.executable).parent
MADDR = "/ip4/203.0.113.7/tcp/30001/p2p/12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW"
_TABLE = re.compile(r"^<!-- test: features -->\n((?:^\|.*\n)+)", re.MULTILINE)
_MARK = re.compile(r"(?:^<!-- test: ([\w.]+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; `mark` is what the comment above it says."""

    mark: str
    language: str
    text: str


def blocks_of(text: str) -> list[Block]:
    return [Block(mark or "", language, body) for mark, language, body in _MARK.findall(text)]


def blocks(text: str, language: str) -> list[str]:
    return [block.text for block in blocks_of(text) if block.language == language]


def commands(text: str) -> list[str]:
    """The lines of the bash blocks that are to be run, continued lines joined."""
    return list(_commands(text, parsed=False))


def parsed_commands(text: str) -> list[str]:
    """The lines of the bash blocks that are only parsed."""
    return list(_commands(text, parsed=True))


def features(text: str) -> dict[str, str]:
    """The commands of the table of features, by their purpose."""
    rows = [row.split(" | ") for table in _TABLE.findall(text) for row in table.splitlines()[2:]]
    return {what.removeprefix("| "): command.strip("`| ") for what, command in rows}


def names_in_table(text: str, before: str) -> set[str]:
    """The names in backticks in the first column of the table that begins with, or stands below, this line."""
    rows = text.partition(f"{before}\n")[2].partition("\n\n")[0].splitlines()
    assert rows, before
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}


def typed(command: str, *more: Any, **replaced: Any) -> list[str]:
    """The words of a command, with `more` appended, the values of some flags replaced, and <maddr> filled in.

    In the names of flags to replace, `_` stands for a dash and `__` for a dot.
    """
    maddr = replaced.pop("maddr", "")
    words = [word.replace("<maddr>", maddr) for word in shlex.split(command)]
    for flag, value in replaced.items():
        words[words.index(f"--{flag.replace('__', '.').replace('_', '-')}") + 1] = str(value)
    program = BIN / Path(words[0]).name
    assert program.exists(), f"{words[0]} is not in this environment"
    return [str(program), *words[1:], *map(str, more)]


def _commands(text: str, *, parsed: bool) -> Iterator[str]:
    for block in blocks_of(text):
        if block.language == "bash" and (block.mark == "parsed") is parsed:
            lines = block.text.replace("\\\n", " ").splitlines()
            yield from (re.sub(r"\s+", " ", line).strip() for line in lines if line.strip())
