"""Loads functions and classes of the user's from the files or modules that flags name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from diloco.errors import UserError


def check_named(flag: str, name: str) -> None:
    """Check, before anything is started, that the file or module exists, without running it. Raises UserError."""
    place, _, called = name.rpartition(":")
    form = f"write {flag} file.py:name or package.module:name"
    if not place or not called.isidentifier():
        raise UserError(f"{flag} {name} names nothing in a file or module; {form}")
    if place.endswith(".py"):
        if not Path(place).expanduser().is_file():
            raise UserError(f"{flag} {name}: there is no file {place}")
    elif _spec_of(place) is None:
        raise UserError(f"{flag} {name}: there is no module {place} here; {form}")


def loaded(flag: str, name: str) -> Callable[..., Any]:
    """The function or class that the flag names. Raises UserError if it is missing or cannot be loaded."""
    check_named(flag, name)
    place, _, called = name.rpartition(":")
    try:
        module = (
            _from_file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
        )
    except Exception as error:
        raise UserError(f"{flag} {name}: {place} fails with {type(error).__name__}: {error}") from error
    found: Callable[..., Any] | None = getattr(module, called, None)
    if found is None or not callable(found):
        raise UserError(f"{flag} {name}: {place} has no {called} that can be called")
    return found


def options_of(name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Read `option=value` of the dataset `name`; values are Python's literals, or else strings. Raises UserError."""
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--dataset {name}: {setting!r} is not option=value")
        try:
            options[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key.strip()] = value
    return options


def finite(value: object, what: str) -> float:
    """A reward that the user's code has returned. Raises UserError unless it is a finite number."""
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise UserError(f"{what} returned {value!r}; it must return a finite number")
    return float(value)


def _spec_of(module: str) -> object:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # A console script has its own directory in sys.path instead of the current one.
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def _from_file(path: Path) -> ModuleType:
    # The prefix keeps it from replacing a module that is imported under the name of the file.
    spec = importlib.util.spec_from_file_location(f"diloco_own_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    # As in any import: dataclasses and typing look up the module of a class there.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module
