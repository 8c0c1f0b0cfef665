"""Small plots of benchmark results, in the format of the path's suffix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SIZE_INCHES = (6.4, 4.0)


Band = tuple[float, float, float]
"""Mean, least and greatest value."""


def lines(
    path: Path, series: Mapping[str, Sequence[tuple[float, Band]]], *, title: str, x_label: str, y_label: str
) -> None:
    """Plot one line for each series of (x, y), with the range of y as a band; the legend is in order of the ends."""
    with _figure(path, title) as axes:
        ordered = sorted(series.items(), key=lambda named: -named[1][-1][1][0])
        for name, points in ordered:
            x = [x for x, _ in points]
            (line,) = axes.plot(x, [y[0] for _, y in points], label=name, linewidth=1.2)
            axes.fill_between(
                x, [y[1] for _, y in points], [y[2] for _, y in points], color=line.get_color(), alpha=0.15
            )
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis("{x:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def points(
    path: Path, values: Mapping[str, tuple[float, Band]], *, title: str, x_label: str, y_label: str
) -> None:
    """Plot one point for each (x, y), x on a log scale, with its name beside it and the range of y as a bar."""
    with _figure(path, title) as axes:
        for name, (x, (y, low, high)) in values.items():
            axes.errorbar(x, y, yerr=[[y - low], [high - y]], marker="o", markersize=4, capsize=2)
            axes.annotate(name, (x, y), xytext=(6, 3), textcoords="offset points", fontsize="small")
        axes.set_xscale("log")
        axes.margins(x=0.2)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.3)


def bars(
    path: Path,
    values: Mapping[str, tuple[float, float, float]],
    *,
    title: str,
    x_label: str,
    log_x: bool = False,
) -> None:
    """Plot one horizontal bar for each (median, min, max), the first on top."""
    with _figure(path, title) as axes:
        names = list(values)
        medians = [values[name][0] for name in names]
        below = [median - values[name][1] for name, median in zip(names, medians, strict=True)]
        above = [values[name][2] - median for name, median in zip(names, medians, strict=True)]
        axes.barh(names, medians, xerr=[below, above], capsize=3)
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        if log_x:
            axes.set_xscale("log")
        axes.grid(alpha=0.3, axis="x")


@contextmanager
def _figure(path: Path, title: str) -> Iterator[Any]:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            f"no matplotlib to draw {path} with; install diloco with its dependencies, or leave --plot out"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    # Text that is stored as text keeps files small; a fixed hash salt makes ids, and so the files, reproducible.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "diloco"}):
        figure, axes = pyplot.subplots(figsize=_SIZE_INCHES, layout="constrained")
        try:
            axes.set_title(title, fontsize="medium")
            yield axes
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        finally:
            pyplot.close(figure)
