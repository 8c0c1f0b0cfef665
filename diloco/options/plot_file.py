"""Writes plots to files, and checks the path of --plot before a long computation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot_path(path: Path) -> None:
    """Raise UserError if `write_plot` could not write the file. To be called before a long computation."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if (kind := _kind_of(path)) not in kinds:
        raise UserError(
            f"--plot {path}: {kind} is not a supported format; use one of {', '.join(sorted(kinds))}"
        )
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--plot {path} cannot be written; is there a directory {path.parent}?")


def write_plot(figure: Figure, path: Path) -> None:
    """As `save_figure`, for the file of --plot. Raises UserError if it cannot be written."""
    try:
        save_figure(figure, path)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path} cannot be written: {error}") from error


def save_figure(figure: Figure, path: Path) -> None:
    """Write the plot atomically, in the format of the path's suffix."""
    from matplotlib import rc_context

    partial = path.with_name(f"{path.name}.partial")
    kind = _kind_of(path)
    try:
        # Text as text makes small files; a fixed hash salt makes ids, and so the files, reproducible.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "diloco"}):
            figure.savefig(partial, format=kind, metadata={"Date": None} if kind == "svg" else None)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _kind_of(path: Path) -> str:
    return path.suffix.lstrip(".").lower() or "png"
