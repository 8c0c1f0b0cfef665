"""Tables of what providers, pods, logs and users have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table


def add_plain_row(table: Table, *cells: str) -> None:
    """Add a row whose cells are shown as they are: rich would take the brackets of `[rank0]` for markup."""
    table.add_row(*map(Text, cells))
