"""Writes records to metrics.jsonl, one flat JSON object per line, and forwards them to sinks such as wandb."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from diloco.options.trainer import TrainConfig
from diloco.outer.world import World, on_rank_zero
from diloco.train.metrics_file import LinePrinter
from diloco.train.run_dir import METRICS
from diloco.train.sinks import QueuedSink, Sink, opened_sinks

log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 16
Kind = Literal["step", "epoch", "eval", "event", "activations", "rollouts"]


class Metrics:
    """Appends records on rank 0 of a peer; on other ranks `path` is None and records are discarded.

    If the file cannot be written, records are lost until it can, and training continues. Each sink has its own queue
    and thread, so one that hangs or fails loses records without delaying training.
    """

    def __init__(
        self,
        path: Path | None,
        sinks: Sequence[Sink] = (),
        *,
        on_trouble: Callable[[str, str], None] = lambda _what, _text: None,
    ) -> None:
        """`on_trouble(subject, text)` is called when writing starts to fail, and with text "" when it recovers."""
        self._on_trouble = on_trouble
        self._file: io.FileIO | None = None
        self._is_failing = False
        self._sinks = [QueuedSink(sink) for sink in sinks]
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut_off_partial_line(path)
            # Unbuffered: each line is one write, so a reader never sees half a line.
            self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, kind: Kind, **values: Any) -> None:
        """Append a record of this kind, with the time added. NaN and infinities are written as null."""
        if self._file is None:
            return
        record = {"kind": kind, **{k: _plain(v) for k, v in values.items()}, "time": round(time.time(), 3)}
        self._append(self._file, (json.dumps(record, allow_nan=False) + "\n").encode())
        for sink in self._sinks:
            sink.write(record)

    def _append(self, file: io.FileIO, line: bytes) -> None:
        """Write the whole line, or leave the file as it was."""
        size = os.fstat(file.fileno()).st_size
        try:
            if file.write(line) == len(line):
                if self._is_failing:
                    self._on_trouble("metrics", "")
                self._is_failing = False
                return
            reason = "no space left"
        except OSError as error:
            reason = error.strerror or str(error)
        with contextlib.suppress(OSError):
            # Fails for a pipe or device, which has nothing to cut off.
            os.truncate(file.fileno(), size)
        if not self._is_failing:
            text = f"cannot write to {file.name} ({reason}): its records are lost until this is fixed"
            log.warning("%s", text)
            self._on_trouble("metrics", text)
        self._is_failing = True

    def close(self) -> None:
        """Close the file and the sinks, which have a few seconds to write queued records. Repeating it is safe."""
        if self._file is not None:
            self._file.close()
            self._file = None
        while self._sinks:
            self._sinks.pop().close()


def opened_metrics(
    config: TrainConfig, run_dir: Path, world: World, *, on_trouble: Callable[[str, str], None]
) -> Metrics:
    """A trainer's Metrics: a file, stdout, and the sinks of `--metric-logger-type`. Raises UserError. A collective."""
    sinks: list[Sink] = [LinePrinter()]
    on_rank_zero(lambda: sinks.extend(opened_sinks(config, run_dir)))
    return Metrics(run_dir / METRICS if world.is_main else None, sinks, on_trouble=on_trouble)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _cut_off_partial_line(path: Path) -> None:
    """Remove an incomplete last line, which a power failure may have left."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end, newline = file.seek(0, os.SEEK_END), -1
        while end > 0 and newline < 0:
            begin = max(0, end - _BLOCK_BYTES)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            end = begin + newline + 1
        file.truncate(end)
