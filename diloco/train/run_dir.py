"""The directory that holds everything of a run: metrics, logs, configuration, model, plots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from diloco.errors import UserError
from diloco.options.trainer import TrainConfig, to_toml
from peers.daemon.restarts import last_line

METRICS = "metrics.jsonl"


def created_run_dir(config: TrainConfig) -> Path:
    """The run directory asked for, or runs/<UTC time>-<project>: absolute, made, with its logs directory."""
    path = Path(config.run_dir).expanduser() if config.run_dir else default_run_dir(config.project)
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {path} cannot be made: {error.strerror}.") from error
    return path.resolve()


def default_run_dir(project: str) -> Path:
    """A name that is new to the second; the caller makes the directory."""
    safe_project = re.sub(r"[^A-Za-z0-9._-]+", "-", project).strip(".-") or "run"
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{safe_project}"


def written_config(config: TrainConfig, run_dir: Path) -> Path:
    """Write <run_dir>/config.toml, which --config reads back, in one piece."""
    path = run_dir / "config.toml"
    path.with_suffix(".toml.new").write_text(to_toml(config), encoding="utf-8")
    return path.with_suffix(".toml.new").replace(path)


def last_words(log_path: Path, *, max_lines: int = 15) -> str:
    """What a process said last: the text of its last box if it printed one, else the end of its log."""
    try:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(_box_in(lines) or lines[-max_lines:])


def reason_in(log: str) -> str:
    """Why a process ended, in one line: the text of its last box, its last exception, or else its last line."""
    lines = log.splitlines()
    if box := _box_in(lines):
        return " ".join(box)
    raised = [
        index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")
    ]
    # Behind the frames, which are indented; a library may say more after that.
    after = lines[raised[-1] + 1 :] if raised else []
    error = next((line for line in after if line.strip() and not line[0].isspace()), "")
    return error or last_line(log)


def _box_in(lines: Sequence[str]) -> list[str]:
    """The text of the last box, without its frame."""
    starts = [index for index, line in enumerate(lines) if line.startswith("╭─")]
    box = lines[starts[-1] + 1 :] if starts else []
    return [line.removeprefix("│ ").removesuffix("│").rstrip() for line in box if not line.startswith("╰")]


def slug(dataset: str) -> str:
    """A data set's name as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", re.split("[=,]", dataset)[0]).strip("-")
