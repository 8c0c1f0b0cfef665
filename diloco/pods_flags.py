"""What `diloco provision`, `pods` and `experiments` have in common: where pods are written down, and how they speak."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from provisioning.ledger import Ledger
    from provisioning.providers.registry import Access

StateFile = Annotated[
    Path | None,
    Parameter(
        name="--state-file",
        help="Where it is written down which pods are yours; default: $XDG_STATE_HOME/diloco/pods.sqlite.",
    ),
]
Inventory = Annotated[
    Path | None,
    Parameter(name="--inventory", help="TOML file of the machines you own, for --provider ssh."),
]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="One JSON object on stdout.")]


def say(name: str, text: str) -> None:
    """One line of progress; stdout is for results."""
    print(f"{time.strftime('%H:%M:%S')} {name:<10} {text}", file=sys.stderr, flush=True)


def opened(state_file: Path | None) -> Ledger:
    from diloco.swarm_config import state_dir
    from provisioning.ledger import Ledger

    return Ledger((state_file or state_dir() / "pods.sqlite").expanduser().absolute())


def access(inventory: Path | None) -> Access:
    import os

    from diloco.swarm_config import state_dir
    from provisioning.providers.registry import Access

    return Access(
        state_dir=state_dir(), environment=os.environ, inventory=inventory.absolute() if inventory else None
    )


def run(main: Coroutine[Any, Any, int]) -> int:
    from diloco.interrupts import run_interruptible

    return run_interruptible(main)


def locked(ledger: Ledger, work: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Do it as the one command that changes these pods."""
    with ledger.locked():
        return run(work())


def ensure_watcher(ledger: Ledger) -> None:
    """Where a pod has an end that its provider does not keep, a process of ours does, beside every command."""
    import os

    from provisioning import watcher

    argv = [sys.executable, "-m", "diloco", "pods", "reconcile", "--watch", "--state-file", str(ledger.path)]
    # Found also where diloco is not installed but run from its source.
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    if watcher.start(ledger.path, argv, {**os.environ, "PYTHONPATH": path}):
        say("–", "a process in the background gives back pods whose time is over")
