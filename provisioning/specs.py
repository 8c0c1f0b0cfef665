"""The pods that somebody wants, from flags, a TOML file, or a Python file with code of theirs."""

from __future__ import annotations

import importlib.util
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from provisioning.errors import UserError
from provisioning.field_types import check_field_types
from provisioning.pods import PodSpec

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
