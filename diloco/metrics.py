"""metrics.jsonl, one flat JSON object a line, and what else the figures are sent to."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from diloco.errors import UserError

log = logging.getLogger(__name__)

Kind = Literal["step", "epoch", "eval", "event", "activations"]


class Sink(Protocol):
    """Somewhere else that records go."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """Appends records. Only rank 0 of a peer has one that writes; `path` is None on the others."""

    def __init__(self, path: Path | None, sinks: list[Sink] | None = None) -> None:
        self._file = None
        self._sinks = sinks or []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_off_partial_line(path)
            # Kept open for the life of the run; each line is one write, so a reader never sees half of one.
            self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, kind: Kind, **values: Any) -> None:
        """Append a record of this kind with the time added. Numbers that are not finite are written as null."""
        if self._file is None:
            return
        record = {"kind": kind, **{k: _plain(v) for k, v in values.items()}, "time": round(time.time(), 3)}
        self._file.write((json.dumps(record, allow_nan=False) + "\n").encode())
        for sink in list(self._sinks):
            try:
                sink.write(record)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not take the training down
                log.warning("no more metrics to %s: %s", type(sink).__name__, error)
                self._sinks.remove(sink)

    def close(self) -> None:
        """Close the file and the sinks. Repeating it is safe."""
        if self._file is not None:
            self._file.close()
            self._file = None
        while self._sinks:
            self._sinks.pop().close()


class WandbSink:
    """A Weights & Biases run; WANDB_MODE offline and disabled work as everywhere."""

    def __init__(
        self,
        *,
        project: str,
        run_dir: Path,
        config: dict[str, Any],
        name: str | None = None,
        tags: tuple[str, ...] = (),
    ) -> None:
        """Raises UserError when wandb is missing or the run cannot be started."""
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "--metric-logger-type wandb needs wandb: pip install 'diloco[wandb]', or use dummy"
            ) from error
        try:
            self._run = wandb.init(project=project, dir=run_dir, config=config, name=name, tags=tags)
        except (wandb.Error, OSError, ValueError) as error:
            mode = os.environ.get("WANDB_MODE", "online")
            raise UserError(
                f"wandb did not start (WANDB_MODE={mode}): {error}; try WANDB_MODE=offline or `wandb login`"
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        values = {f"{kind}/{k}": v for k, v in record.items() if k not in ("kind", "step", "time")}
        # The step is a value and not wandb's own: records of one step come one by one, and a resumed run goes back.
        self._run.log({**values, "step": record.get("step")})

    def close(self) -> None:
        self._run.finish()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _cut_off_partial_line(path: Path) -> None:
    """A machine that lost power may have left half a line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        end = file.tell()
        while end > 0:
            file.seek(end - 1)
            if file.read(1) == b"\n":
                break
            end -= 1
        file.truncate(end)
