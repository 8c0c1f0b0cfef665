"""The run directory, which holds metrics, logs, configuration, model and plots; and reading a process's last output."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from diloco.errors import UserError
from diloco.options.trainer import TrainConfig, to_toml
from peers.daemon.restarts import last_line
from peers.errors import PeersError
from provisioning.errors import Busy
from provisioning.errors import UserError as PodsError
from provisioning.ledger.lock import held

METRICS = "metrics.jsonl"
CONFIG = "config.toml"
LOCK = "lock"
SCRATCH = "checkpoints"
"""Directory of the files of checkpoints in transfer to or from a URL."""


@contextlib.contextmanager
def run_dir_of(config: TrainConfig) -> Iterator[Path]:
    """As `created_run_dir`, for this process alone while the block runs. For the process that a user starts, not for
    the workers that it starts.

    Removes a new directory if the block raises UserError or PeersError before it has a configuration: a peer that
    cannot join may be started again and again. Raises UserError if another process uses the directory.
    """
    is_new = not (config.run_dir and Path(config.run_dir).expanduser().exists())
    run_dir = created_run_dir(config)
    with locked(run_dir / LOCK, "--run-dir"):
        if not config.run_dir:
            _clear_scratch_beside(run_dir)
        try:
            yield run_dir
        except (UserError, PeersError):
            if is_new and not (run_dir / CONFIG).exists():
                shutil.rmtree(run_dir, ignore_errors=True)
            raise


@contextlib.contextmanager
def locked(lock: Path, flag: str) -> Iterator[None]:
    """Hold this lock for the directory that it is in, which `flag` names. Raises UserError if another process does."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(held(lock))
        except Busy as holder:
            raise UserError(
                f"{flag} {lock.parent} is in use by process {holder}; give another directory, or stop that process."
            ) from None
        except PodsError as error:
            raise UserError(f"{flag}: {error}") from error
        except OSError:
            # Some network file systems have no locks. Runs there are not refused.
            pass
        yield


def _clear_scratch_beside(run_dir: Path) -> None:
    """Remove what killed runs have left of checkpoints in transfer: no run sees the directory of the one before."""
    for lock in run_dir.parent.glob(f"*/{LOCK}"):
        # Those of `diloco run` have a directory for each peer.
        left = [
            path for below in (".", "*") for path in lock.parent.glob(f"{below}/{SCRATCH}/model_step_*-*")
        ]
        with contextlib.suppress(Busy, PodsError, OSError):
            if left:
                with held(lock):
                    for path in left:
                        shutil.rmtree(path, ignore_errors=True)


def created_run_dir(config: TrainConfig) -> Path:
    """Create `--run-dir`, or else a new runs/<UTC time>-<project>, with a logs directory; returns the absolute path."""
    path = Path(config.run_dir).expanduser() if config.run_dir else default_run_dir(config.project)
    try:
        if not config.run_dir:
            path = _new_directory(path)
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {path} cannot be made: {error.strerror}.") from error
    return path.resolve()


def _new_directory(first: Path) -> Path:
    """Create the directory, with a number after its name if another run began in the same second."""
    path, number = first, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = first.with_name(f"{first.name}-{number}")
        else:
            return path


def default_run_dir(project: str) -> Path:
    """A path that is unique to the second. It is not created."""
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{_safe(project)}"


def run_id_of(run_dir: Path) -> str:
    """A --run-id made from the directory's name, so the same after a resume there."""
    return _safe(run_dir.name)[:64]


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-") or "run"


def written_config(config: TrainConfig, run_dir: Path) -> Path:
    """Write <run_dir>/config.toml atomically; `--config` reads it back."""
    path = run_dir / CONFIG
    path.with_suffix(".toml.new").write_text(to_toml(config), encoding="utf-8")
    return path.with_suffix(".toml.new").replace(path)


def last_words(log_path: Path, *, since: int = 0, max_lines: int = 15) -> str:
    """The text of the last framed message in a process's log if there is one, else the last lines.

    `since` is the size of the log, in bytes, when the process started.
    """
    try:
        lines = log_path.read_bytes()[since:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(_box_in(lines) or lines[-max_lines:])


def reason_in(log: str) -> str:
    """Why a process ended: the lines of its last framed message, else its last exception, else its last line."""
    lines = log.splitlines()
    if box := _box_in(lines):
        return "\n".join(box)
    raised = [
        index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")
    ]
    # The exception is the first line behind the stack frames, which are indented. More output may follow it.
    after = lines[raised[-1] + 1 :] if raised else []
    error = next((line for line in after if line.strip() and not line[0].isspace()), "")
    return error or last_line(log)


def _box_in(lines: Sequence[str]) -> list[str]:
    """The text of the last framed message, without the frame."""
    starts = [index for index, line in enumerate(lines) if line.startswith("╭─")]
    box = lines[starts[-1] + 1 :] if starts else []
    return [line.removeprefix("│ ").removesuffix("│").rstrip() for line in box if not line.startswith("╰")]


def slug(dataset: str) -> str:
    """A data set's name in a form that is safe in file names."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", re.split("[=,]", dataset)[0]).strip("-")
