"""Plots a run: training and validation loss over time, lost and returning peers, and averagings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.options.plot_file import save_figure
from diloco.train.metrics_file import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SMOOTHED_STEPS = 20
_INCHES = (9.0, 5.0)
_DPI = 120
_NOTICEABLE_S = 5.0
_NEAR_END = 0.85
_MAX_EPOCH_MARKS = 80
"""Marks of epochs are drawn up to this number; more could not be distinguished."""


@dataclass(frozen=True)
class Session:
    """The records of a peer from a start of its process to its end or loss."""

    began_at: float
    ended_at: float
    steps: Sequence[Record]
    has_finished: bool = False


def sessions_of(records: Sequence[Record]) -> list[Session]:
    """Split one peer's records at its starts. Times are Unix seconds."""
    parts: list[list[Record]] = []
    for record in records:
        if not parts or (record.get("event") == "start" and any("time" in r for r in parts[-1])):
            parts.append([])
        parts[-1].append(record)
    sessions = []
    for part in parts:
        times = [float(record["time"]) for record in part if "time" in record]
        steps = [r for r in part if r.get("kind") == "step" and r.get("loss") is not None]
        if times:
            has_finished = any(record.get("event") == "finished" for record in part)
            sessions.append(Session(min(times), max(times), steps, has_finished))
    return sessions


def absences(sessions: Sequence[Session], ended_at: float) -> list[tuple[float, float]]:
    """Intervals (from, to) in which a peer was lost; the last one ends with the run if the peer did not come back."""
    found = [(before.ended_at, after.began_at) for before, after in itertools.pairwise(sessions)]
    if sessions and not sessions[-1].has_finished and ended_at - sessions[-1].ended_at > _NOTICEABLE_S:
        found.append((sessions[-1].ended_at, ended_at))
    return found


def validation_of(records: Sequence[Record]) -> list[tuple[float, float]]:
    """(seconds since the first record, loss) of each evaluation, by time."""
    began_at = min((float(record["time"]) for record in records if "time" in record), default=0.0)
    evaluations = [r for r in records if r.get("kind") == "eval" and r.get("loss") is not None]
    return sorted((float(record["time"]) - began_at, float(record["loss"])) for record in evaluations)


def plot(
    records_of: Mapping[str, Sequence[Record]], path: Path, *, title: str, alone: Sequence[Record] = ()
) -> None:
    """Write a PNG with each peer's training loss and the validation loss over time, peers' losses and returns, and
    averagings. `alone` adds the validation loss of a training without a swarm, over its own time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    factor, unit = _unit_of([record for peer in records_of.values() for record in peer])
    records_of = {peer: _scaled(own, factor) for peer, own in records_of.items()}
    records, alone = [record for peer in records_of.values() for record in peer], _scaled(alone, factor)
    times = [float(record["time"]) for record in records if "time" in record]
    began_at, ended_at = min(times, default=0.0), max(times, default=0.0)
    _draw_epochs(axes, records, began_at)
    for index, (peer, own) in enumerate(records_of.items()):
        _draw_peer(axes, peer, sessions_of(own), began_at, ended_at, f"C{index % 10}")
    if alone:
        _draw_validation(axes, validation_of(alone), "validation, alone", is_alone=True)
    _draw_validation(axes, validation_of(records), "validation", is_alone=False)
    axes.set(title=title, xlabel="seconds", ylabel=f"loss ({unit})")
    axes.grid(alpha=0.25, which="both")
    axes.margins(y=0.12)
    # A linear scale would be dominated by the loss of the untrained model.
    if axes.lines and axes.dataLim.y0 > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=8, frameon=False)
    save_figure(figure, path)


def _unit_of(records: Sequence[Record]) -> tuple[float, str]:
    """A factor for losses in nats per token, and the resulting unit: bits per byte, as in the report, if an evaluation
    has both figures."""
    for record in records:
        if record.get("kind") == "eval" and record.get("loss") and record.get("bits_per_byte"):
            return float(record["bits_per_byte"]) / float(record["loss"]), "bits per byte"
    return 1.0, "nats per token"


def _scaled(records: Sequence[Record], factor: float) -> list[Record]:
    return [
        record if record.get("loss") is None else {**record, "loss": float(record["loss"]) * factor}
        for record in records
    ]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The moving average of each value and the `window` - 1 values before it."""
    means: list[float] = []
    total = 0.0
    for index, value in enumerate(values):
        total += value - (values[index - window] if index >= window else 0.0)
        means.append(total / min(index + 1, window))
    return means


def _draw_peer(
    axes: Axes, peer: str, sessions: Sequence[Session], began_at: float, ended_at: float, colour: str
) -> None:
    num_steps = sum(len(session.steps) for session in sessions)
    window = max(1, min(num_steps // 20, _SMOOTHED_STEPS))
    label: str | None = peer
    for session in sessions:
        if session.steps:
            times = [float(record["time"]) - began_at for record in session.steps]
            losses = smoothed([record["loss"] for record in session.steps], window)
            axes.plot(times, losses, color=colour, label=label, linewidth=1.4)
            label = None
    for lost_at, returned_at in absences(sessions, ended_at):
        lost_at, returned_at = lost_at - began_at, returned_at - began_at
        axes.axvspan(lost_at, returned_at, color=colour, alpha=0.12, linewidth=0)
        is_back = returned_at < ended_at - began_at
        # Near the end there is no room to the right of the line.
        side_of_back = "right" if returned_at > _NEAR_END * (ended_at - began_at) else "left"
        for x, what, side in (
            (lost_at, "lost", "right"),
            *([(returned_at, "back", side_of_back)] if is_back else []),
        ):
            axes.axvline(x, color=colour, linestyle="--", linewidth=1)
            axes.annotate(
                f" {peer} {what} ",
                (x, 0.02),
                xycoords=("data", "axes fraction"),
                color=colour,
                ha=side,
                fontsize=9,
            )


def _draw_validation(
    axes: Axes, points: Sequence[tuple[float, float]], label: str, *, is_alone: bool
) -> None:
    line, face = (":", "white") if is_alone else ("", "black")
    if points:
        times, losses = zip(*points, strict=True)
        axes.plot(
            times,
            losses,
            color="black",
            marker="o",
            markerfacecolor=face,
            markersize=6,
            linestyle=line,
            label=label,
            zorder=4,
        )
    for x, y in points:
        side = (0, 8) if is_alone else (0, -16)
        axes.annotate(f"{y:.2f}", (x, y), xytext=side, textcoords="offset points", ha="center")


def _draw_epochs(axes: Axes, records: Sequence[Record], began_at: float) -> None:
    ended: dict[int, float] = {}
    for record in records:
        if record.get("kind") == "epoch" and "time" in record:
            at = float(record["time"]) - began_at
            ended[record["epoch"]] = min(at, ended.get(record["epoch"], at))
    label: str | None = "averaged"
    for at in ended.values() if len(ended) <= _MAX_EPOCH_MARKS else ():
        axes.axvline(at, ymin=0.97, color="0.35", linewidth=1, label=label)
        label = None
