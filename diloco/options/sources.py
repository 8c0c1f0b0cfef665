"""Reads values that were not given as flags from a TOML file or a manifest."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import CycloptsError

from diloco.errors import UserError
from diloco.options.common_names import suggested_name

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import ArgumentCollection


class ValueSource:
    """A cyclopts config source: fills fields that no flag has set, from `values` or from the file of `--config`.

    `find` maps the path of --config to a file on this machine; for None, no file is read.
    After parsing, `named` holds the dotted names of the fields that a flag or the file has set.
    """

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        name: str = "",
        find: Callable[[Path], Path | None] = lambda path: path,
    ) -> None:
        self._values = values
        self._name = name
        self._find = find
        self.named: frozenset[str] = frozenset()

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        from cyclopts.argument import update_argument_collection

        values, name = self._values, self._name
        if values is None:
            values, name = self._values_of_file(arguments)
        known = {".".join(argument.keys) for argument in arguments if argument.keys}
        sections = {key.rpartition(".")[0] for key in known} - {""}
        nested = _nested(values, known - sections, name)
        try:
            update_argument_collection(
                nested, name, arguments, app.app_stack.stack[-1], root_keys=(), allow_unknown=False
            )
        except UserError as error:
            raise CycloptsError(msg=str(error)) from error
        self.named = _fields_with_tokens(arguments)

    def _values_of_file(self, arguments: ArgumentCollection) -> tuple[dict[str, Any], str]:
        tokens = [token for argument in arguments if argument.name == "--config" for token in argument.tokens]
        if not tokens:
            return {}, ""
        try:
            path = self._find(Path(tokens[-1].value))
            return ({}, "") if path is None else (read_toml(path), str(path))
        except UserError as error:
            raise CycloptsError(msg=str(error)) from error


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's values by dotted name, with dashes replaced by underscores. Raises UserError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not TOML: {error}.") from error
    return dict(_flat(table, ""))


def _fields_with_tokens(arguments: ArgumentCollection) -> frozenset[str]:
    return frozenset(".".join(argument.keys) for argument in arguments if argument.keys and argument.tokens)


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = prefix + key.replace("-", "_")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _nested(values: Mapping[str, Any], known: set[str], source: str) -> dict[str, Any]:
    """The values as nested tables, which cyclopts expects, without those that are None."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            close = suggested_name(name, known)
            hint = f' Did you mean "{close}"?' if close else ""
            raise CycloptsError(msg=f'Unknown key "{name}" in {source}.{hint}')
        if value is None:
            continue
        *sections, key = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = list(value) if isinstance(value, tuple) else value
    return nested
