"""Plots the results of sets of experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import UserError
from diloco.options.plot_file import write_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from provisioning.experiments.runs import Result

_WIDTH_INCHES, _INCHES_PER_BAR, _INCHES_BESIDE = 8.0, 0.3, 1.2
_DPI = 120


def draw_results(by_set: Mapping[str, Sequence[Result]], path: Path) -> None:
    """Write a plot with a bar for each experiment that has a figure, coloured by set; one panel for each metric.

    Raises UserError if there is nothing to draw, or the file cannot be written.
    """
    from matplotlib.figure import Figure

    drawn = [
        (name, result)
        for name, results in by_set.items()
        for result in results
        if result.figure is not None and math.isfinite(result.figure)
    ]
    if not drawn:
        raise UserError(f"--plot {path}: no experiment has a result yet.")
    metrics = list(dict.fromkeys(result.metric for _, result in drawn))
    panels = [[(name, result) for name, result in drawn if result.metric == metric] for metric in metrics]
    heights = [_INCHES_BESIDE + _INCHES_PER_BAR * len(panel) for panel in panels]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights)), dpi=_DPI, layout="constrained")
    all_axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    colours = {name: f"C{index % 10}" for index, name in enumerate(by_set)}
    for axes, metric, panel in zip(all_axes, metrics, panels, strict=True):
        _draw_panel(axes, metric, panel, colours)
    write_plot(figure, path)


def _draw_panel(
    axes: Axes, metric: str, panel: Sequence[tuple[str, Result]], colours: Mapping[str, str]
) -> None:
    for name in dict.fromkeys(name for name, _ in panel):
        rows = [row for row, (set_name, _) in enumerate(panel) if set_name == name]
        figures = [panel[row][1].figure or 0.0 for row in rows]
        # An unescaped dollar sign would begin a formula.
        bars = axes.barh(rows, figures, color=colours[name], label=name.replace("$", r"\$"))
        axes.bar_label(bars, fmt="%.4g", padding=3)
    names = [result.name if result.ok else f"{result.name} (failed)" for _, result in panel]
    axes.set_yticks(range(len(panel)), names)
    axes.invert_yaxis()
    axes.set_xlabel(metric or "figure")
    axes.margins(x=0.15)
    axes.grid(alpha=0.3, axis="x")
    axes.legend(title="set", fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
