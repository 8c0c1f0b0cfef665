"""All constants of time are defined in one file."""

from __future__ import annotations

import ast
from pathlib import Path

import peers

ROOT = Path(peers.__file__).parent
NOT_WAITS = ("MAX_", "PER_S")
"""Parts of the names of rates and of limits on what others may send."""


def seconds_named_in(path: Path) -> list[str]:
    """The time constants whose seconds this file defines, rather than deriving them from another constant."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and not any(isinstance(n, ast.Name) for n in ast.walk(node.value)):
            targets = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            found += [
                name for name in targets if name.endswith("_S") and not any(w in name for w in NOT_WAITS)
            ]
    return found


def test_every_constant_of_time_follows_from_those_in_one_file():
    elsewhere = {path: seconds_named_in(path) for path in ROOT.rglob("*.py") if path.name != "timing.py"}
    assert {str(path): names for path, names in elsewhere.items() if names} == {}
    assert seconds_named_in(ROOT / "core" / "timing.py") == []
    assert len(seconds_named_in(ROOT / "timing.py")) <= 28
