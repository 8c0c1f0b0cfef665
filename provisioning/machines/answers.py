"""Decodes what pods answer. None of it is trusted: what is malformed counts as absent."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1 << 53)]
"""A count that may be written as a float, such as 400.0."""
_MAX_DIGITS = 18


def decoded(text: str, kind: type[T]) -> T | None:
    """The JSON in `text` as `kind`, a msgspec type, without fields that `kind` lacks; None: it is malformed."""
    try:
        return msgspec.json.decode(text.encode(), type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def record_in(line: str | bytes) -> dict[str, Any]:
    """The record in a line of metrics.jsonl; empty if the line is malformed. Its values may be of any type."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def number_in(word: str) -> int | None:
    """The whole number that this word is; None: it is none, or a very long one."""
    return int(word) if re.fullmatch(rf"[0-9]{{1,{_MAX_DIGITS}}}", word) else None
