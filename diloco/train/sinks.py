"""Sinks for Weights & Biases and TensorBoard."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Any

from diloco.errors import UserError

log = logging.getLogger(__name__)

_ID_FILE = "wandb-run-id"
_INIT_TIMEOUT_S = 30.0


class WandbSink:
    """A Weights & Biases run. WANDB_MODE has its usual meaning."""

    def __init__(
        self,
        *,
        project: str,
        run_dir: Path,
        config: dict[str, Any],
        name: str | None = None,
        group: str | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        """`group` collects the runs of one swarm. Raises UserError if wandb is missing or the run cannot be started.

        A worker restarted in the same run directory resumes its wandb run. If the server does not answer, the run is
        kept offline.
        """
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "--metric-logger-type wandb needs wandb: pip install 'diloco[wandb]', or use dummy"
            ) from error
        settings: dict[str, Any] = {
            "project": project,
            "dir": run_dir,
            "config": config,
            "name": name,
            "group": group,
            "job_type": "peer" if group else None,
            "tags": tags,
            "resume": "allow",
        }
        try:
            settings["id"] = _id_of(run_dir)
            try:
                patience = wandb.Settings(init_timeout=_INIT_TIMEOUT_S)
                self._run = wandb.init(**settings, settings=patience)
            except wandb.errors.CommError as error:
                log.warning(
                    "wandb does not answer (%s): its records are kept in %s, for `wandb sync`",
                    error,
                    run_dir / "wandb",
                )
                # wandb's background service would not accept the same run id a second time.
                wandb.teardown()
                self._run = wandb.init(**settings, mode="offline")
        except (wandb.Error, OSError, ValueError) as error:
            mode = os.environ.get("WANDB_MODE", "online")
            raise UserError(
                f"wandb did not start (WANDB_MODE={mode}): {error}; try WANDB_MODE=offline or `wandb login`"
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        values = {f"{kind}/{k}": v for k, v in record.items() if k not in ("kind", "step", "time")}
        # The step is a value: wandb's own step must increase, but a step has several records and a resume repeats it.
        self._run.log({**values, "step": record.get("step")})

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink:
    """Writes event files to <run_dir>/tensorboard: every number of a record as `kind/name` at the record's step."""

    def __init__(self, *, run_dir: Path) -> None:
        """Raises UserError when tensorboard is missing or the directory cannot be written."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "--metric-logger-type tensorboard needs tensorboard: pip install 'diloco[tensorboard]', or use dummy"
            ) from error
        try:
            self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        except OSError as error:
            raise UserError(f"cannot write to {run_dir / 'tensorboard'}: {error.strerror}") from error

    def write(self, record: dict[str, Any]) -> None:
        kind, step = record["kind"], record.get("step")
        for name, value in record.items():
            if name not in ("kind", "step", "time") and type(value) in (int, float):
                self._writer.add_scalar(f"{kind}/{name}", value, global_step=step, walltime=record["time"])

    def close(self) -> None:
        self._writer.close()


def _id_of(run_dir: Path) -> str:
    """The id of this directory's wandb run, created on first use. Raises OSError."""
    path = run_dir / _ID_FILE
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(secrets.token_hex(8))
    except FileExistsError:
        pass
    return path.read_text(encoding="utf-8")
