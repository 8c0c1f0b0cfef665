"""Sinks of records: Weights & Biases and TensorBoard, opened by configuration, each behind a queue of its own."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from diloco.errors import UserError
from diloco.options.trainer import TrainConfig, flat_values
from diloco.train.run_dir import slug

log = logging.getLogger(__name__)

CAPACITY = 1000
"""Queued records: minutes' worth, to bridge a short outage of the sink's service."""
CLOSE_TIMEOUT_S = 15.0
"""Time for a sink to write its queued records at the end."""
_ID_FILE = "wandb-run-id"
_INIT_TIMEOUT_S = 30.0


class Sink(Protocol):
    """A receiver of records, used from one thread."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def opened_sinks(config: TrainConfig, run_dir: Path) -> list[Sink]:
    """The sinks that `--metric-logger-type` names. Raises UserError if one cannot be started."""
    sinks: list[Sink] = []
    if "tensorboard" in config.metric_loggers:
        sinks.append(TensorBoardSink(run_dir))
    if "wandb" in config.metric_loggers:
        sinks.append(WandbSink(config, run_dir))
    return sinks


def run_name(config: TrainConfig) -> str | None:
    """The wandb run's name: run id and world rank of a peer; for GRPO, dataset, model, `--grpo.run-suffix` and world
    rank. None lets wandb choose.
    """
    rank = config.hv.world_rank
    peer = f"peer-{rank}" if rank is not None else ""
    if config.mode != "grpo":
        return f"{config.hv.run_id}-{peer}" if peer else None
    parts = [f"trl_{slug(config.grpo.dataset)}_grpo_{Path(config.path_model).name}", config.grpo.run_suffix]
    return "_".join(filter(None, (*parts, peer)))


class WandbSink:
    """A Weights & Biases run. WANDB_MODE has its usual meaning."""

    def __init__(self, config: TrainConfig, run_dir: Path) -> None:
        """The runs of one swarm are a group. Raises UserError if the run cannot be started.

        A worker restarted in the same run directory resumes its wandb run. If the server does not answer, the run is
        kept offline.
        """
        import wandb

        is_peer = config.hv.world_rank is not None or bool(config.hv.initial_peers)
        settings: dict[str, Any] = {
            "project": config.project,
            "dir": run_dir,
            "config": flat_values(config),
            "name": run_name(config),
            "group": config.hv.run_id if is_peer else None,
            "job_type": "peer" if is_peer else None,
            "tags": (f"seed{config.seed}",) if config.mode == "grpo" else (),
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

    def __init__(self, run_dir: Path) -> None:
        """Raises UserError when the directory cannot be written."""
        from torch.utils.tensorboard import SummaryWriter

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


class QueuedSink:
    """Passes records to a sink in order. Records are dropped while the queue is full, with one warning."""

    def __init__(self, sink: Sink, *, capacity: int = CAPACITY) -> None:
        self._sink, self._name = sink, type(sink).__name__
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(capacity)
        self._has_failed = threading.Event()
        self._num_dropped = 0
        # A daemon thread, so that a sink that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """Queue a record; never blocks."""
        if self._has_failed.is_set():
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if self._num_dropped == 0:
                log.warning(
                    "%s takes no metrics at the moment; what it misses is in metrics.jsonl", self._name
                )
            self._num_dropped += 1

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait at most `timeout_s` for the sink to write the queued records."""
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            log.warning("%s hangs; its last %d records are lost", self._name, self._queue.qsize())
        elif self._num_dropped:
            log.warning("%s has missed %d records", self._name, self._num_dropped)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            if self._has_failed.is_set():
                continue
            try:
                self._sink.write(record)
            except Exception as error:  # noqa: BLE001 - no failure of a sink may end the training
                log.warning("%s failed and gets no more metrics: %s", self._name, error)
                self._has_failed.set()
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001
            log.warning("%s did not close: %s", self._name, error)


def _id_of(run_dir: Path) -> str:
    """The id of this directory's wandb run, created on first use. Raises OSError."""
    path = run_dir / _ID_FILE
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(secrets.token_hex(8))
    except FileExistsError:
        pass
    return path.read_text(encoding="utf-8")
