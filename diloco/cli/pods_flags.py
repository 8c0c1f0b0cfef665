"""What `diloco provision`, `pods` and `experiments` have in common: where pods are written down, and how they speak."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from diloco.errors import UserError

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
    print(line_of(name, text), file=sys.stderr, flush=True)


def line_of(name: str, text: str) -> str:
    return f"{time.strftime('%H:%M:%S')} {name:<10} {text}"


def opened(state_file: Path | None) -> Ledger:
    from diloco.launch.swarm_config import state_dir
    from provisioning.ledger import Ledger

    return Ledger((state_file or state_dir() / "pods.sqlite").expanduser().absolute())


def opened_existing(state_file: Path | None) -> Ledger:
    """The same, for what has no sense without pods: a file that was named and is not there is an error."""
    if state_file is not None and not state_file.expanduser().exists():
        raise UserError(f"There is no state file {state_file}: no pods were ever written down there.")
    return opened(state_file)


def access(inventory: Path | None) -> Access:
    import os

    from diloco.launch.swarm_config import state_dir
    from provisioning.providers.registry import Access

    return Access(
        state_dir=state_dir(), environment=os.environ, inventory=inventory.absolute() if inventory else None
    )


def run(main: Coroutine[Any, Any, int]) -> int:
    from diloco.cli.interrupts import run_interruptible

    return run_interruptible(main)


def locked(ledger: Ledger, work: Callable[[], Coroutine[Any, Any, int]], *, for_jobs: bool = False) -> int:
    """Do it as the one command that changes these pods, or that runs jobs on them."""
    with ledger.locked(for_jobs=for_jobs):
        return run(work())


def ensure_watcher(ledger: Ledger, tell: Callable[[str, str], None] = say) -> None:
    """Where a pod has an end, or an order is in doubt, a process of ours sees to it beside every command."""
    import os

    from provisioning import watcher
    from provisioning.operations import is_to_be_watched

    if not is_to_be_watched(ledger):
        return
    argv = [sys.executable, "-m", "diloco", "pods", "reconcile", "--watch", "--state-file", str(ledger.path)]
    # Found also where diloco is not installed but run from its source.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    if watcher.start(ledger.path, argv, {**os.environ, "PYTHONPATH": path}):
        tell(
            "–", "a process in the background gives back pods whose time is over, and pods of orders in doubt"
        )
