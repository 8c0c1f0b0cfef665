"""What a peer is doing, since when, how far it is, and when it will be done. Pure: times are arguments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.monitor.figures import short_figure, span
from peers.monitor.journal import printable
from peers.protocol.limits import MAX_REAL
from peers.protocol.reports import MAX_PHASE_CHARACTERS, Phase, Point


@dataclass(frozen=True)
class Doing:
    """What a peer is doing now. `total` 0: unknown. `left_s`: given if it is known better than by the pace so far."""

    name: str
    detail: str = ""
    done: float = 0.0
    total: float = 0.0
    unit: str = ""
    left_s: float | None = None

    @classmethod
    def told(cls, message: Mapping[str, Any]) -> Doing:
        """From a worker, which may be any program: what cannot be shown is dropped."""
        return cls(
            name=printable(str(message.get("name", "")))[:MAX_PHASE_CHARACTERS],
            detail=printable(str(message.get("detail", ""))),
            done=_real(message.get("done")),
            total=_real(message.get("total")),
            unit=printable(str(message.get("unit", "")))[:MAX_PHASE_CHARACTERS],
        )


@dataclass
class PhaseClock:
    """Measures the times of one peer's phases. `now` is of any one clock."""

    _doing: Doing | None = None
    _since: float = 0.0
    _moved_at: float = 0.0
    _counted_from: float = 0.0

    def at(self, doing: Doing, now: float) -> Phase:
        before = self._doing
        if before is None or before.name != doing.name or doing.done < before.done:
            self._since, self._counted_from = now, doing.done
        if before is None or (before.name, before.detail, before.done) != (
            doing.name,
            doing.detail,
            doing.done,
        ):
            self._moved_at = now
        self._doing = doing
        left_s = doing.left_s
        if left_s is None:
            left_s = time_left_s(doing.done - self._counted_from, now - self._since, doing.total - doing.done)
        return Phase(
            name=doing.name,
            detail=doing.detail,
            done=doing.done,
            total=doing.total,
            unit=doing.unit,
            left_s=left_s,
            for_s=max(0.0, now - self._since),
            idle_s=max(0.0, now - self._moved_at),
        )


def time_left_s(done: float, elapsed_s: float, left: float) -> float | None:
    """By the pace so far; None if unknown."""
    if done <= 0 or elapsed_s <= 0 or left < 0:
        return None
    return min(left * elapsed_s / done, MAX_REAL)


def training_left_s(points: Sequence[Point], step: int, end_step: int) -> float | None:
    """Until the run's end, by the last points of a peer's curve, whose times include its rounds."""
    lately = points[-64:]
    if len(lately) < 2 or end_step <= 0:
        return None
    first, last = lately[0], lately[-1]
    return time_left_s(last.step - first.step, last.time - first.time, max(0, end_step - step))


def furthest_training(phases: Iterable[Phase | None]) -> Phase | None:
    """Of the peers that are training, the phase of the one that is furthest: every view takes the run's time left from
    it, so that all views show the same."""
    training = (phase for phase in phases if phase and phase.name == "training" and phase.total)
    return max(training, key=lambda phase: phase.done, default=None)


def in_words(phase: Phase) -> str:
    """In full: "evaluating, 34 of 120 windows, 12 s left"."""
    parts = [f"{phase.name}: {phase.detail}" if phase.detail else phase.name]
    if phase.total or (phase.unit in ("bytes", "steps") and phase.done):
        parts.append(_progress(phase))
    if phase.unit == "bytes" and phase.for_s > 0 and phase.done:
        parts.append(f"{short_figure(phase.done / phase.for_s)}B/s")
    if phase.left_s is not None and phase.left_s >= 1 and phase.total > phase.done:
        parts.append(f"{span(phase.left_s)} left")
    return ", ".join(parts)


def in_short(phase: Phase) -> str:
    """For a table: "evaluating 28 %"."""
    if phase.name in ("training", "averaging") or not phase.total:
        return phase.name
    if phase.unit == "peers":
        return f"{phase.name} {phase.done:.0f}/{phase.total:.0f}"
    return f"{phase.name} {min(1.0, phase.done / phase.total):.0%}"


def _progress(phase: Phase) -> str:
    if phase.unit == "bytes":
        done = f"{short_figure(phase.done)}B"
        return f"{done} of {short_figure(phase.total)}B" if phase.total else done
    if phase.unit == "peers":
        return f"{phase.done:.0f} of {phase.total:.0f} are here"
    if phase.unit == "steps":
        # A program of the user's own may not have said where it ends.
        return f"step {phase.done:.0f}{f' of {phase.total:.0f}' if phase.total else ''}"
    return f"{phase.done:.0f} of {phase.total:.0f} {phase.unit}"


def _real(value: object) -> float:
    return (
        min(max(float(value), 0.0), MAX_REAL)
        if isinstance(value, int | float) and math.isfinite(value)
        else 0.0
    )
