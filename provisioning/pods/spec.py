"""Which pods somebody wants: PodSpec, and how tables, from flags or a TOML file, become checked PodSpecs."""

from __future__ import annotations

import itertools
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from provisioning.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    D = TypeVar("D", bound=DataclassInstance)

Figure = Annotated[float, Meta(ge=0, lt=1e12)]
OWN_MACHINES = frozenset({"local", "ssh"})
"""Providers whose machines are there anyway; all others rent."""
# Fields that say how a pod is bought and for how long, not what machine it is.
_TERMS = frozenset({"ttl_hours", "max_price"})


@dataclass(frozen=True, kw_only=True)
class PodSpec:
    """A pod that somebody wants. None: any will do."""

    name: str
    gpu_type: str | None = "A100"
    gpu_count: Annotated[int, Meta(ge=1)] | None = 8
    country: str | None = None
    """Two letters, such as NL."""
    volume_id: str | None = None
    """A volume of the provider's to attach."""
    ttl_hours: Annotated[float, Meta(gt=0, lt=1e12)] | None = None
    """Hours after which the pod is given back by itself."""
    min_upload_mbps: Figure | None = None
    min_download_mbps: Figure | None = None
    provider: str = "lium"
    """One, or several with commas between them: the cheapest offer that fits is taken first, wherever it is."""
    max_price: Figure | None = None
    """Dollars per hour for the whole pod."""
    image: str | None = None
    """Container image or template, where the provider takes one."""
    spot: bool = False
    """Take machines that may be taken back at any time."""

    @property
    def providers(self) -> tuple[str, ...]:
        return tuple(_names(self.provider))

    def same_machine(self, other: PodSpec) -> bool:
        """Whether a pod rented for the one serves as the other."""
        names = {item.name for item in fields(self)} - _TERMS
        return all(getattr(self, name) == getattr(other, name) for name in names)


def providers_of(specs: Sequence[PodSpec]) -> list[str]:
    """All that these pods may be rented of."""
    return list(dict.fromkeys(name for spec in specs for name in spec.providers))


def specs_of(
    tables: Sequence[Mapping[str, Any]], origin: str, *, gpu_types: Sequence[str] = (), **common: Any
) -> list[PodSpec]:
    """A PodSpec for each table, checked. Raises UserError.

    What a table does not say is as in `common`, unless that is None, then as is usual for its provider; tables without
    a GPU type take `gpu_types` in turn.
    """
    common = {name: value for name, value in common.items() if value is not None}
    specs, turns = [], itertools.cycle(gpu_types)
    for index, table in enumerate(tables):
        values = {"name": f"pod-{index}", **common, **table}
        if gpu_types and "gpu_type" not in values:
            values["gpu_type"] = next(turns)
        usual = usual_for(str(values.get("provider", PodSpec.provider)))
        specs.append(typed(PodSpec, {**usual, **values}, f"{origin}, pod {values['name']}"))
    name, number = Counter(spec.name for spec in specs).most_common(1)[0] if specs else ("", 0)
    if number > 1:
        raise UserError(f"{origin} has two pods named {name}.")
    for spec in specs:
        is_word = spec.name.replace("-", "").replace("_", "").isalnum() and spec.name.isascii()
        if not is_word or len(spec.name) > 40:
            raise UserError(f'"{spec.name}" is no name for a pod: use up to 40 letters, digits and dashes.')
    return specs


def usual_for(provider: str) -> dict[str, Any]:
    """What differs from PodSpec's defaults on machines that are there anyway: they are taken as they are.

    Local pods share the processors of this machine: one training process each.
    """
    names = set(_names(provider))
    if not names or not names <= OWN_MACHINES:
        return {}
    return {"gpu_count": None, "gpu_type": None if "ssh" in names else "cpu-1"}


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


def _names(provider: str) -> list[str]:
    return [name for name in provider.split(",") if name]
