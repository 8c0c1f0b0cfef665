"""The commands of the README that rent pods, as typed there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from tests.support.commands import DILOCO, training_flags

PROVISION = "diloco provision --pods 3"
STATUS, LOGS, DOWN = "diloco pods status", "diloco pods logs", "diloco pods down"
_LONG = {"hv.local-steps": 5, "max-steps": 1_000_000, "per-device-train-batch-size": None}
ALL = frozenset({PROVISION, STATUS, LOGS, DOWN})


def argv_of(command: str, *more: Any) -> list[str]:
    """The words of a command, run by this Python, with `more` behind them."""
    assert sys.executable == DILOCO[0]
    return [*DILOCO, *shlex.split(command)[1:], *map(str, more)]


def tiny_training(model: Path, **changes: Any) -> list[str]:
    """Flags behind `--` that put a model which trains in milliseconds in the place of the README's."""
    return training_flags(model, **{**_LONG, **changes})
