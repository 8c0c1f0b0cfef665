"""The pods that somebody wants, from flags, a TOML file, or a Python file with code of theirs."""

from __future__ import annotations

import importlib.util
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from provisioning.errors import UserError
from provisioning.pods.pod import PodSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_FIELDS = {item.name for item in fields(PodSpec)}


def wanted(num_pods: int, gpu_types: Sequence[str], **common: Any) -> list[PodSpec]:
    """pod-0, pod-1, … which take the GPU types in turn; a field that is None keeps PodSpec's default."""
    values = {name: value for name, value in common.items() if value is not None}
    types: list[dict[str, Any]] = [{"gpu_type": name} for name in gpu_types] or [{}]
    return [PodSpec(name=f"pod-{index}", **types[index % len(types)], **values) for index in range(num_pods)]


def from_file(path: Path, **common: Any) -> list[PodSpec]:
    """The `[[pods]]` of a TOML file, or what `pods()` returns in a Python file. Raises UserError.

    `common` fills what a table of the TOML file does not say.
    """
    if path.suffix == ".py":
        specs = called(path, "pods")
        if not isinstance(specs, list) or not all(isinstance(spec, PodSpec) for spec in specs):
            raise UserError(f"pods() in {path} has to return a list of provisioning.pods.PodSpec.")
        return checked(specs, str(path))
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("pods", [])
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}.") from error
    return specs_of(tables, str(path), **common)


def specs_of(tables: Any, origin: str, **common: Any) -> list[PodSpec]:
    """PodSpecs of tables as TOML has them. Raises UserError."""
    if not isinstance(tables, list) or not tables:
        raise UserError(f"{origin} has no [[pods]].")
    values = {name: value for name, value in common.items() if value is not None}
    specs = []
    for index, table in enumerate(tables):
        if not isinstance(table, dict):
            raise UserError(f"{origin} has no [[pods]].")
        unknown = sorted(set(table) - _FIELDS | ({"where"} & set(table)))
        if unknown:
            known = ", ".join(sorted(_FIELDS - {"where"}))
            raise UserError(f"{origin}, pod {index}: unknown field {unknown[0]}; there are {known}.")
        specs.append(PodSpec(**{"name": f"pod-{index}", **values, **table}))
    return checked(specs, origin)


def checked(specs: Sequence[PodSpec], origin: str) -> list[PodSpec]:
    """The same. Raises UserError for names that are used twice or are no names, and numbers out of range."""
    for spec in specs:
        check_field_types(spec, f"{origin}, pod {spec.name}")
    twice = [name for name, number in Counter(spec.name for spec in specs).items() if number > 1]
    if twice:
        raise UserError(f"{origin} has two pods named {twice[0]}.")
    for spec in specs:
        if (
            not spec.name.replace("-", "").replace("_", "").isalnum()
            or not spec.name.isascii()
            or len(spec.name) > 40
        ):
            raise UserError(f'"{spec.name}" is no name for a pod: use up to 40 letters, digits and dashes.')
        if spec.ttl_hours is not None and spec.ttl_hours <= 0:
            raise UserError(f"{spec.name}: ttl_hours {spec.ttl_hours:g} is not more than 0.")
        if spec.gpu_count is not None and spec.gpu_count < 1:
            raise UserError(f"{spec.name}: gpu_count {spec.gpu_count} is not 1 or more.")
    return list(specs)


def called(path: Path, function: str) -> Any:
    """What a function without arguments returns in a Python file of the user's. Raises UserError."""
    module = _loaded(path)
    if not callable(getattr(module, function, None)):
        raise UserError(f"{path} has no function {function}().")
    try:
        return getattr(module, function)()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{function}() in {path} failed: {type(error).__name__}: {error}") from error


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("diloco_user_file", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file that can be read.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} failed: {type(error).__name__}: {error}") from error
    return module


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
