"""Chooses the column of a dataset that holds the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco.errors import UserError

_USUAL_NAMES = ("text", "content", "raw_content", "document", "body", "code", "sentence")


def text_column_of(row: Mapping[str, Any], *, named: str | None, dataset: str) -> str:
    """The column `named`, else one with a usual name, else the only one with strings; raises UserError otherwise."""
    strings = [name for name, value in row.items() if isinstance(value, str)]
    if named is not None:
        if named in strings or (named in row and row[named] is None):
            return named
        raise UserError(
            f"{dataset} has no text in a column {named!r}; its columns with text are {strings or 'none'}"
        )
    for name in _USUAL_NAMES:
        # The text of the first row may be null.
        if name in strings or (name in row and row[name] is None):
            return name
    if len(strings) == 1:
        return strings[0]
    if not strings:
        raise UserError(f"{dataset} has no column with text, only {list(row)}; name a dataset that has one")
    raise UserError(f"{dataset} has several columns with text, {strings}; choose one with --text-column")


def text_of(row: Mapping[str, Any], column: str, *, where: str) -> str:
    """The row's text, "" if it is null; raises UserError if it is not a string."""
    value = row.get(column)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    return value
