"""Reads metrics.jsonl while it grows, and prints records and phases as lines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.train.file_tail import FileTail
from peers.monitor.figures import short_figure, span
from peers.monitor.phases import in_words
from peers.protocol.reports import Phase

Record = Mapping[str, Any]
_SEARCHED_BYTES = 1 << 16


class Tail:
    """Reads the records of a file while it grows."""

    def __init__(self, path: Path, *, since: float = 0.0) -> None:
        """Most of the records from before `since` (Unix time) are skipped."""
        self._file = FileTail(path, start=_start_of(path, since))

    def records(self) -> Iterator[Record]:
        """Yields the records since the last read; lines that are not JSON objects are skipped."""
        for line in self._file.lines():
            if (record := _record(line)) is not None:
                yield record

    def read(self) -> list[Record]:
        """The records since the last read."""
        return list(self.records())


def _start_of(path: Path, since: float) -> int:
    """The offset of a record from before `since`, searched from the end: the file may be huge. 0 if none is found."""
    if since <= 0.0 or not path.exists():
        return 0
    with path.open("rb") as file:
        size, back = file.seek(0, 2), _SEARCHED_BYTES
        while back < size:
            file.seek(size - back)
            file.readline()
            start = file.tell()
            record = _record(file.readline().decode(errors="replace"))
            if record is not None and float(record.get("time") or since) < since:
                return start
            back *= 2
    return 0


def _record(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def line_of(record: Record) -> str | None:
    """A record formatted as one line; None for kinds that are not printed."""
    match record.get("kind"):
        case "step":
            return (
                f"step {_number(record, 'step')}  epoch {_number(record, 'epoch')}  "
                f"{_reward_or_loss(record)}  {figure(record.get('tokens_per_s'))} tokens/s"
            )
        case "epoch":
            number = num_contributors(record)
            if number == "0":
                return f"epoch {_number(record, 'epoch')} was averaged without this peer, whose work goes into the next"
            return (
                f"epoch {_number(record, 'epoch')} averaged by {number} peer{'' if number == '1' else 's'} in "
                f"{decimals(record.get('round_s'), 2)} s, {size(record.get('sent_bytes'))} sent, "
                f"{size(record.get('received_bytes'))} received, "
                f"anchor {str(record.get('anchor_digest', '?'))[:12]}"
            )
        case "eval" if "reward" in record:
            return (
                f"evaluation at step {_number(record, 'step')}: reward {decimals(record.get('reward'))}, "
                f"pass@1 {decimals(record.get('pass_at_1'))}"
            )
        case "eval":
            return (
                f"evaluation at step {_number(record, 'step')}: loss {decimals(record.get('loss'))}, "
                f"{decimals(record.get('bits_per_byte'))} bits per byte"
            )
        case "event" if record.get("event") == "start":
            rank = record.get("world_rank")
            place = "" if rank is None else f", as world rank {rank}"
            return f"starts at step {_number(record, 'step')}, epoch {_number(record, 'epoch')}{place}"
        case "event" if record.get("event") == "checkpoint":
            return f"saved step {_number(record, 'step')}, {size(record.get('bytes'))}"
        case "event" if record.get("event") == "checkpoint_failed":
            return f"step {_number(record, 'step')} was not saved: {record.get('reason')}"
        case "event" if record.get("event") == "checkpoint_skipped":
            return f"skipped a damaged checkpoint: {record.get('reason')}"
        case "event" if record.get("event") == "few_files":
            return (
                f"the dataset has {_number(record, 'num_files')} files, fewer than the {_number(record, 'num_parts')} "
                "parts among which it is divided: every peer downloads all files for each part that it trains on"
            )
        case "event" if record.get("event") == "long_steps":
            return (
                f"a step is {figure(record.get('step_tokens'))} tokens, which takes about "
                f"{span(float(record.get('step_s') or 0.0))} here; --total-batch-size makes it smaller"
            )
        case "event" if record.get("event") == "no_first_evaluation":
            seconds = float(record.get("seconds") or 0.0)
            return f"not evaluated before training: that would take about {span(seconds)} here"
        case "event":
            return str(record.get("event"))
    return None


def _reward_or_loss(record: Record) -> str:
    """The reward of a GRPO step, whose loss does not measure progress; else the loss."""
    name = "reward" if "reward" in record else "loss"
    return f"{name} {decimals(record.get(name))}"


def num_contributors(epoch: Record) -> str:
    """The number of contributors to an epoch; a dash if that is not recorded."""
    contributors = epoch.get("contributors")
    return str(len(contributors)) if isinstance(contributors, list) else "–"


def figure(value: Any) -> str:
    """A number to three digits: 950, 12.3k, 4.5M."""
    if not isinstance(value, int | float):
        return "–"
    return short_figure(value)


def size(value: Any) -> str:
    """Bytes in decimal units."""
    return f"{figure(value)}B" if isinstance(value, int | float) else "–"


def decimals(value: object, digits: int = 3, unit: str = "") -> str:
    return f"{value:.{digits}f}{unit}" if isinstance(value, int | float) else "–"


def _number(record: Record, key: str) -> str:
    return str(record.get(key, "–"))


LINE_INTERVAL_S = 5.0
"""Least time between two step lines, or two lines of phases: more of them would hide the lines of epochs."""
LEAST_PHASE_S = 2.0
"""A phase is printed only after it has lasted this long."""
_COVERED_BY_RECORDS = ("training", "leaving")


@dataclass
class RecordLines:
    """Formats one peer's metric records as lines, with step records limited to one per LINE_INTERVAL_S."""

    _stepped_at: float = float("-inf")

    def of(self, record: Record, now: float) -> str | None:
        if record.get("kind") == "step":
            if now - self._stepped_at < LINE_INTERVAL_S:
                return None
            self._stepped_at = now
        return line_of(record)


@dataclass
class PhaseLines:
    """Formats one peer's phases as lines: only long ones, at most one line per LINE_INTERVAL_S, none twice in a row."""

    _last_line: str = ""
    _printed_at: float = float("-inf")

    def of(self, phase: Phase, now: float) -> str | None:
        # Steps have records, but only once they are done, so a step that takes long has a phase with a detail.
        is_covered = phase.name in _COVERED_BY_RECORDS and not phase.detail
        if is_covered or phase.for_s < LEAST_PHASE_S:
            return None
        line = in_words(phase)
        if line == self._last_line or now - self._printed_at < LINE_INTERVAL_S:
            return None
        self._last_line, self._printed_at = line, now
        return line


class LinePrinter:
    """A sink that prints records to stdout."""

    def __init__(self) -> None:
        self._lines = RecordLines()

    def write(self, record: dict[str, Any]) -> None:
        if line := self._lines.of(record, time.monotonic()):
            print(line, flush=True)

    def close(self) -> None: ...
