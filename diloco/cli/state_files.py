"""The state files, which list pods: one by default, and one for each set of experiments."""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from diloco.cli.pods_flags import ensure_watcher
from diloco.errors import UserError

if TYPE_CHECKING:
    from provisioning.ledger.ledger import Ledger

SetStateFile = Annotated[
    Path | None,
    Parameter(
        name="--state-file",
        help="File that records the set's pods and results; default: one for each set, below "
        "$XDG_STATE_HOME/diloco/experiments.",
    ),
]


def opened(state_file: Path | None) -> Ledger:
    from provisioning.ledger.ledger import Ledger

    return Ledger((state_file or _default_state_file()).expanduser().absolute())


def opened_existing(state_file: Path | None) -> Ledger:
    """As `opened`, but raises UserError if the user names a file that does not exist."""
    if state_file is not None and not state_file.expanduser().exists():
        raise UserError(f"There is no state file {state_file}: no pods were ever written down there.")
    return opened(state_file)


def _default_state_file() -> Path:
    from diloco.launch.swarm_config import state_dir

    return state_dir() / "pods.sqlite"


def typed(command: str, ledger: Ledger) -> str:
    """The command as the user types it for this state file: with --state-file unless it is the default one."""
    if ledger.path == _default_state_file().absolute():
        return command
    return f"{command} --state-file {shlex.quote(str(ledger.path))}"


def say_if_empty(ledger: Ledger) -> None:
    """Say on stderr that there are no pods, if so."""
    if not ledger.rows():
        print(f"there are no pods in {ledger.path}", file=sys.stderr, flush=True)


def tell_other_state_files(command: str) -> None:
    """Print which other state files still list pods, and how to type this command for each."""
    from diloco.launch.swarm_config import state_dir
    from provisioning.errors import UserError as PodsError

    default = opened(None)
    default.close()
    for path in (*sorted(state_dir().glob("*.sqlite")), *sorted(state_dir().glob("experiments/*.sqlite"))):
        if path.absolute() == default.path:
            continue
        try:
            ledger = opened_existing(path)
            rows = [row for row in ledger.rows() if row.state != "planned"]
        except PodsError as error:
            print(f"!!! {error}", file=sys.stderr, flush=True)
            continue
        if rows:
            rate = sum(row.offer.price_per_hour for row in rows)
            print(
                f"{path} holds {', '.join(row.name for row in rows)}, {rate:.2f} $/h: `{typed(command, ledger)}`",
                file=sys.stderr,
                flush=True,
            )
            # The watcher may have ended with a restart of this machine.
            ensure_watcher(ledger)
        ledger.close()


def state_file_of(name: str) -> Path:
    """The state file of a set, named after the set; for a set in a TOML file, also after a hash of its path."""
    from diloco.launch.swarm_config import state_dir
    from provisioning.experiments.sets import BUILT_IN

    stem = Path(name).stem
    if name not in BUILT_IN:
        stem += f"-{hashlib.sha256(str(Path(name).resolve()).encode()).hexdigest()[:8]}"
    return state_dir() / "experiments" / f"{stem}.sqlite"
