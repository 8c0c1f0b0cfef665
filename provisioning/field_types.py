"""Whether what a user's file says is of the types that the fields of a dataclass have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from provisioning.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", _is_text),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": (
        "a finite number",
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value),
    ),
    "Mapping[str, str]": (
        "a table of texts",
        lambda value: isinstance(value, Mapping) and all(map(_is_text, [*value, *value.values()])),
    ),
    "Sequence[str]": (
        "a list of texts",
        lambda value: isinstance(value, list | tuple) and all(map(_is_text, value)),
    ),
    "Sequence[int]": (
        "a list of whole numbers",
        lambda value: (
            isinstance(value, list | tuple)
            and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
        ),
    ),
    "None": ("left out", lambda value: value is None),
}
"""By the annotations that are used; fields of others are not looked at."""


def check_field_types(item: DataclassInstance, where: str) -> None:
    """Raises UserError for the first field whose value is none of what its annotation names."""
    for one in fields(item):
        check_type(one.name, getattr(item, one.name), str(one.type), where)


def check_type(name: str, value: Any, annotation: str, where: str) -> None:
    """Raises UserError."""
    names = annotation.split(" | ")
    if not all(name in _KINDS for name in names):
        return
    kinds = [_KINDS[name] for name in names]
    if not any(is_of(value) for _, is_of in kinds):
        raise UserError(f"{where}: {name} is {value!r} and has to be {kinds[0][0]}.")
