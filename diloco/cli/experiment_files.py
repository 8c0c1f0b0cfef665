"""Where the pods and results of a set of experiments are written down, and what a set is called."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco.cli.pods_flags import opened_existing

SetStateFile = Annotated[
    Path | None,
    Parameter(
        name="--state-file",
        help="File that records the set's pods and results; default: one for each set, below "
        "$XDG_STATE_HOME/diloco/experiments.",
    ),
]


def state_file_of(name: str) -> Path:
    """Where the pods and results of a set are written down: by its name, and of a file also by its path."""
    from diloco.launch.swarm_config import state_dir
    from provisioning.experiments.sets import BUILT_IN

    by_name = state_dir() / "experiments" / f"{Path(name).stem}.sqlite"
    if name in BUILT_IN:
        return by_name
    origin = origin_of(name)
    by_path = by_name.with_stem(f"{by_name.stem}-{hashlib.sha256(origin.encode()).hexdigest()[:8]}")
    # Earlier versions went by the name alone: their pods and results are not to be lost.
    is_older = by_name.exists() and not by_path.exists() and by_name.stem not in BUILT_IN
    return by_name if is_older and _written_origin(by_name) in ("", origin) else by_path


def origin_of(name: str) -> str:
    """The name of a built-in set, or the whole path of a file."""
    from provisioning.experiments.sets import BUILT_IN

    return name if name in BUILT_IN else str(Path(name).resolve())


def shown(origin: str) -> str:
    """The name of a set for people: its path from here, where it is below."""
    path, here = Path(origin), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else origin


def _written_origin(file: Path) -> str:
    from provisioning.experiments.runs import ORIGIN

    ledger = opened_existing(file)
    try:
        return ledger.recall(ORIGIN)
    finally:
        ledger.close()
