"""Starts the workers of a peer whose daemon runs in this process, and prints the daemon's messages."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.options.flags import TrainConfig
from diloco.train.devices import thread_settings
from diloco.train.run_dir import reason_in, written_config

if TYPE_CHECKING:
    from peers.daemon.supervisor import WorkerCommand

PRINTED_LOGGERS = tuple(
    f"peers.daemon.{name}"
    for name in (
        *("agreement", "daemon", "downloads", "main", "rollout_peer", "rollout_service", "runtime"),
        *("supervisor", "worker_monitor"),
    )
)


def worker_command(
    config: TrainConfig,
    run_dir: Path,
    link_path: Path,
    *,
    module: str,
    program: Sequence[str] = (),
    num_ranks: int = 1,
    num_peers: int = 1,
) -> WorkerCommand:
    """The workers' command line: `program`, or else `module` with the configuration, which this function writes.

    `num_peers` peers share this machine.
    """
    from peers.daemon.supervisor import WorkerCommand

    path = written_config(config, run_dir)
    return WorkerCommand(
        argv=tuple(program) or (sys.executable, "-m", module, "--config", str(path)),
        env=_environment(link_path, num_workers=num_ranks * num_peers),
        cwd=Path.cwd(),
        log_path=worker_log(run_dir),
        reason_in=reason_in,
        num_ranks=num_ranks,
    )


def worker_log(run_dir: Path) -> Path:
    return run_dir / "logs" / "worker.log"


def path_with_this_python() -> str:
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def _environment(link_path: Path, *, num_workers: int) -> dict[str, str]:
    """The environment of a worker that shares this machine with `num_workers` - 1 others."""
    from peers.admission.secrets import SECRET_ENV
    from peers.daemon.link import LINK_ENV

    return {
        # The secret is for the daemon alone: a training program has no use for it, and may log its environment.
        **{name: value for name, value in os.environ.items() if name != SECRET_ENV},
        # "python" in --worker means the interpreter of this process.
        "PATH": path_with_this_python(),
        LINK_ENV: str(link_path),
        **thread_settings(os.environ, num_workers),
        "PYTHONUNBUFFERED": "1",
    }


def log_and_print(path: Path) -> None:
    """Write all messages to this file, and print those of PRINTED_LOGGERS, which describe what the daemon does."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    for name in PRINTED_LOGGERS:
        logging.getLogger(name).addHandler(_Printer())


class _Printer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        # Not to a stream that was stored earlier: while the table is shown, sys.stdout prints above it.
        print(record.getMessage(), flush=True)
