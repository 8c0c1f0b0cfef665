"""Chooses which records and phases of a training are printed, and how often."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from diloco.train.metrics_file import Record, line_of
from peers.monitor.phases import in_words
from peers.protocol.reports import Phase

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
        # A step has no record before it is done; only one that takes long has a detail.
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
