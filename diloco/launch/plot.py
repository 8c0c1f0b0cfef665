"""Plots a run: losses over time with lost peers, returns and averagings; or, for GRPO, rewards over the inner steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.launch.run_facts import RecordsOf, absences, rewards_by_step, sessions_of, span_of
from diloco.options.plot_file import save_figure
from diloco.train.metrics_file import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMOOTHED_STEPS = 20
_MAX_EPOCH_MARKS = 80
"""Marks of epochs are drawn up to this number; more could not be distinguished."""


def plot_losses(records_of: RecordsOf, path: Path, *, title: str, alone: Sequence[Record] = ()) -> None:
    """Write a PNG with each peer's training loss and the validation loss over time, peers' losses and returns, and
    averagings. `alone` adds the validation loss of a training without a swarm, over its own time."""
    records = [record for own in records_of.values() for record in own]
    factor, unit = _unit_of(records)
    figure, axes = _drawing(title, "seconds", f"loss ({unit})")
    began_at, ended_at = span_of(records)
    ended = {
        record["epoch"]: record["time"] - began_at for record in records if record.get("kind") == "epoch"
    }
    if 0 < len(ended) <= _MAX_EPOCH_MARKS:
        axes.vlines(
            list(ended.values()),
            0.97,
            1,
            transform=axes.get_xaxis_transform(),
            color="0.35",
            label="averaged",
        )
    for index, (peer, own) in enumerate(records_of.items()):
        _draw_peer(axes, peer, own, began_at, ended_at, factor, f"C{index % 10}")
    for name, found, style in (("validation, alone", alone, "o:k"), ("validation", records, "ok")):
        if points := [(at, loss * factor) for at, loss in validation_of(found)]:
            axes.plot(
                *zip(*points, strict=True), style, label=name, fillstyle="none" if found is alone else "full"
            )
        for x, y in points:
            offset = (0, 8) if found is alone else (0, -16)
            axes.annotate(f"{y:.2f}", (x, y), xytext=offset, textcoords="offset points", ha="center")
    axes.margins(y=0.12)
    # A linear scale would be dominated by the loss of the untrained model.
    if axes.lines and axes.dataLim.y0 > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    _save(figure, axes, path)


def plot_rewards(records_of: RecordsOf, path: Path, *, title: str) -> None:
    """Write a PNG with each peer's mean reward and the evaluations over the inner steps."""
    figure, axes = _drawing(title, "inner steps", "mean reward")
    axes.set_ylim(0.0, 1.0)
    for peer, records in records_of.items():
        if rewards := rewards_by_step(records):
            axes.plot([step for step, _ in rewards], smoothed([reward for _, reward in rewards]), label=peer)
    evaluations = [
        (record["step"], record["reward"])
        for records in records_of.values()
        for record in records
        if record.get("kind") == "eval" and "reward" in record
    ]
    if evaluations:
        axes.plot(*zip(*evaluations, strict=True), "ko", label="held out", markersize=5)
    _save(figure, axes, path)


def validation_of(records: Sequence[Record]) -> list[tuple[float, float]]:
    """(seconds since the first record, loss) of each evaluation, by time."""
    began_at, _ = span_of(records)
    evaluations = [r for r in records if r.get("kind") == "eval" and r.get("loss") is not None]
    return sorted((float(record["time"]) - began_at, float(record["loss"])) for record in evaluations)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and the values before it: of up to _SMOOTHED_STEPS values, fewer in a short run."""
    window = max(1, min(len(values) // 20, _SMOOTHED_STEPS))
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]


def _unit_of(records: Sequence[Record]) -> tuple[float, str]:
    """A factor for losses in nats per token, and the resulting unit: bits per byte, as in the report, if an evaluation
    has both figures."""
    for record in records:
        if record.get("kind") == "eval" and record.get("loss") and record.get("bits_per_byte"):
            return float(record["bits_per_byte"]) / float(record["loss"]), "bits per byte"
    return 1.0, "nats per token"


def _draw_peer(
    axes: Axes,
    peer: str,
    records: Sequence[Record],
    began_at: float,
    ended_at: float,
    factor: float,
    colour: str,
) -> None:
    sessions = sessions_of(records)
    for index, session in enumerate(sessions):
        times = [record["time"] - began_at for record in session.steps]
        losses = smoothed([factor * record["loss"] for record in session.steps])
        axes.plot(times, losses, color=colour, label=peer if index == 0 else None, linewidth=1.4)
    for lost_at, returned_at in absences(sessions, ended_at):
        axes.axvspan(lost_at - began_at, returned_at - began_at, color=colour, alpha=0.12, linewidth=0)
        text = f" {peer} lost{', then back' if returned_at < ended_at else ''} "
        where = (lost_at - began_at, 0.02)
        # Near the right edge, the text is to the left of the moment of the loss.
        side = "right" if lost_at - began_at > 0.8 * (ended_at - began_at) else "left"
        axes.annotate(text, where, xycoords=("data", "axes fraction"), color=colour, fontsize=9, ha=side)


def _drawing(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.0), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.25, which="both")
    return figure, axes


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=8, frameon=False)
    save_figure(figure, path)
