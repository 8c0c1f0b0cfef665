"""Tables of TOML files, and their values as dataclasses."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from provisioning.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)

Figure = Annotated[float, Meta(ge=0, lt=1e12)]
"""A number such as a price or a bandwidth."""


def read_toml(path: Path) -> dict[str, Any]:
    """Raises UserError if the file cannot be read or is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}.") from error


def tables_in(values: Mapping[str, Any], name: str, origin: str) -> list[dict[str, Any]]:
    """The `[[name]]` tables of a TOML file. Raises UserError if there are none."""
    tables = values.get(name)
    if not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
        raise UserError(f"{origin} has no [[{name}]].")
    return tables


def typed(kind: type[D], table: Mapping[str, Any], where: str) -> D:
    """The table as a dataclass. Raises UserError if a field is unknown, or its value invalid."""
    known = {item.name for item in fields(kind)}
    if unknown := sorted(set(table) - known):
        raise UserError(f"{where}: unknown field {unknown[0]}; there are {', '.join(sorted(known))}.")
    try:
        return msgspec.convert(dict(table), kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}".replace(" - at `$.", " in `")) from error
