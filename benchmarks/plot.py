"""Small plots of benchmark results, in the format of the path's suffix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SIZE_INCHES = (6.4, 4.0)


def lines(
    path: Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Plot one line for each series of (x, y)."""
    with _figure(path, title) as axes:
        for name, points in series.items():
            axes.plot([x for x, _ in points], [y for _, y in points], label=name, marker=".", linewidth=1.2)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if log_x:
            axes.set_xscale("log")
        if log_y:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")


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

    # Text as text makes small files; a fixed hash salt makes ids, and so the files, reproducible.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "diloco"}):
        figure, axes = pyplot.subplots(figsize=_SIZE_INCHES, layout="constrained")
        try:
            axes.set_title(title, fontsize="medium")
            yield axes
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        finally:
            pyplot.close(figure)
