"""The file of --plot: checked before anything is computed, and written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_drawable(path: Path) -> None:
    """Raise UserError if `write_plot` could not write the file. Called before what is drawn is computed."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if (kind := _kind_of(path)) not in kinds:
        raise UserError(f"--plot {path}: {kind} is none of the formats {', '.join(sorted(kinds))}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no directory {path.parent}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--plot {path}: no file can be written there; name another")


def write_plot(picture: Figure, path: Path) -> None:
    """Write the plot in the format of the path's suffix. Raises UserError if it cannot be written."""
    from matplotlib import rc_context

    partial = path.with_name(f"{path.name}.partial")
    kind = _kind_of(path)
    try:
        # Text as text makes small files; a fixed hash salt makes ids, and so the files, reproducible.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "diloco"}):
            picture.savefig(partial, format=kind, metadata={"Date": None} if kind == "svg" else None)
        partial.replace(path)
    except (OSError, ValueError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"--plot {path} cannot be written: {error}") from error


def _kind_of(path: Path) -> str:
    return path.suffix.lstrip(".").lower() or "png"
