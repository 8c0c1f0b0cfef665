"""The pods that somebody wants, from flags or a TOML file; and how values of such files get their types."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from provisioning.errors import UserError
from provisioning.pods.pod import PodSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)


def wanted(num_pods: int, gpu_types: Sequence[str], **common: Any) -> list[PodSpec]:
    """pod-0, pod-1, … which take the GPU types in turn; a field that is None keeps PodSpec's default."""
    values = {name: value for name, value in common.items() if value is not None}
    types: list[dict[str, Any]] = [{"gpu_type": name} for name in gpu_types] or [{}]
    return [PodSpec(name=f"pod-{index}", **types[index % len(types)], **values) for index in range(num_pods)]


def from_file(path: Path, **common: Any) -> list[PodSpec]:
    """The `[[pods]]` of a TOML file. `common` fills what a table does not say. Raises UserError."""
    return specs_of(read_toml(path), str(path), **common)


def specs_of(values: Mapping[str, Any], origin: str, **common: Any) -> list[PodSpec]:
    """The PodSpecs of a TOML file's values. Raises UserError."""
    given = {name: value for name, value in common.items() if value is not None}
    tables = tables_in(values, "pods", origin)
    specs = [
        typed(PodSpec, {"name": f"pod-{index}", **given, **table}, f"{origin}, pod {index}")
        for index, table in enumerate(tables)
    ]
    return checked(specs, origin)


def checked(specs: Sequence[PodSpec], origin: str) -> list[PodSpec]:
    """The same. Raises UserError for names that are used twice or are no names, and values that no field takes."""
    specs = [typed(PodSpec, asdict(spec), f"{origin}, pod {spec.name}") for spec in specs]
    name, number = Counter(spec.name for spec in specs).most_common(1)[0] if specs else ("", 0)
    if number > 1:
        raise UserError(f"{origin} has two pods named {name}.")
    for spec in specs:
        is_word = spec.name.replace("-", "").replace("_", "").isalnum() and spec.name.isascii()
        if not is_word or len(spec.name) > 40:
            raise UserError(f'"{spec.name}" is no name for a pod: use up to 40 letters, digits and dashes.')
    return specs


def read_toml(path: Path) -> dict[str, Any]:
    """Raises UserError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}.") from error


def tables_in(values: Mapping[str, Any], name: str, origin: str) -> list[dict[str, Any]]:
    """The `[[name]]` of a TOML file. Raises UserError where there are none."""
    tables = values.get(name)
    if not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
        raise UserError(f"{origin} has no [[{name}]].")
    return tables


def typed(kind: type[D], table: Mapping[str, Any], where: str) -> D:
    """A table as a dataclass. Raises UserError for a field that is unknown, or takes no such value."""
    known = {item.name for item in fields(kind)}
    if unknown := sorted(set(table) - known):
        raise UserError(f"{where}: unknown field {unknown[0]}; there are {', '.join(sorted(known))}.")
    try:
        return msgspec.convert(dict(table), kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{where}: {error}".replace(" - at `$.", " in `")) from error
