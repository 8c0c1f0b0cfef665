"""The commands of the README that rent pods, as typed there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from tests.support.commands import DILOCO, training_flags
from tests.support.documents import PAGES, features

PROVISION = "diloco provision --pods 3"
STATUS, LOGS, DOWN = "diloco pods status", "diloco pods logs", "diloco pods down"
# The rows of the table of features. A new row needs a test that runs its command.
_FEATURES = features(PAGES["docs/tutorials/gpu-pods.md"]).values()
OFFERS, PLAN, DEPLOY, EXTEND, STATUS_OF_FILE, *_MORE = _FEATURES
SETS, SET_PLAN, SET_DEPLOY, SET_RUN, FETCH_LOGS, SET_DOWN, ALL_DOWN, *_MORE = _MORE
LAMBDA_OFFERS, LAMBDA_DEPLOY, WRITE_RAY, RAY_UP, ALEXNET = _MORE
_LONG = {"hv.local-steps": 5, "max-steps": 1_000_000, "per-device-train-batch-size": None}
ALL = frozenset({PROVISION, STATUS, LOGS, DOWN})


def argv_of(command: str, *more: Any) -> list[str]:
    """The words of a command, run by this Python, with `more` appended."""
    assert sys.executable == DILOCO[0]
    return [*DILOCO, *shlex.split(command)[1:], *map(str, more)]


def tiny_training(model: Path, **changes: Any) -> list[str]:
    """Flags after `--` that replace the README's model by one that trains in milliseconds."""
    return training_flags(model, **{**_LONG, **changes})
