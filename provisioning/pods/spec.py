"""PodSpec, the description of a requested pod, and how it is made from flags or TOML tables and checked."""

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
"""Providers of the user's own machines; all others rent."""
_MAX_PRICE_RATIO = 1.5
# Fields about the rental, not about the machine.
_TERMS = frozenset({"ttl_hours", "max_price"})


@dataclass(frozen=True, kw_only=True)
class PodSpec:
    """A requested pod. None: any value will do."""

    name: str
    gpu_type: str | None = "A100"
    gpu_count: Annotated[int, Meta(ge=1)] | None = 8
    country: str | None = None
    """Two-letter code, such as NL."""
    volume_id: str | None = None
    """Id of a volume at the provider, to attach."""
    ttl_hours: Annotated[float, Meta(gt=0, lt=1e12)] | None = None
    """Hours after which the pod is given back automatically; None: never."""
    min_upload_mbps: Figure | None = None
    min_download_mbps: Figure | None = None
    provider: Annotated[str, Meta(min_length=1)]
    """One name, or several separated by commas: then the cheapest fitting offer of all is taken."""
    max_price: Figure | None = None
    """Dollars per hour for the whole pod."""
    image: str | None = None
    """Container image or template, for providers that take one; None: their default."""
    spot: bool = False
    """Also accept machines that the provider may take back at any time."""

    @property
    def providers(self) -> tuple[str, ...]:
        return tuple(_names(self.provider))

    def price_limit(self, agreed: float) -> float:
        """Dollars per hour that another offer may cost in place of one of this price, which the user has agreed to."""
        return agreed * _MAX_PRICE_RATIO if self.max_price is None else self.max_price

    def same_machine(self, other: PodSpec) -> bool:
        """Whether a pod rented for one of the two specs fits the other."""
        names = {item.name for item in fields(self)} - _TERMS
        return all(getattr(self, name) == getattr(other, name) for name in names)


def providers_of(specs: Sequence[PodSpec]) -> list[str]:
    """All providers that these specs allow."""
    return list(dict.fromkeys(name for spec in specs for name in spec.providers))


def specs_of(
    tables: Sequence[Mapping[str, Any]], origin: str, *, gpu_types: Sequence[str] = (), **common: Any
) -> list[PodSpec]:
    """A PodSpec for each table. Raises UserError if a field is invalid, or a name is invalid or used twice.

    Fields missing in a table are taken from `common`, where None means missing, and then from the provider's defaults.
    The provider itself has no default. Tables without a GPU type take `gpu_types` in turn. `origin` names the source in
    error messages.
    """
    common = {name: value for name, value in common.items() if value is not None}
    specs, turns = [], itertools.cycle(gpu_types)
    for index, table in enumerate(tables):
        values = {"name": f"pod-{index}", **common, **table}
        if gpu_types and "gpu_type" not in values:
            values["gpu_type"] = next(turns)
        where = f"{origin}, pod {values['name']}"
        if "provider" not in values:
            raise UserError(f'{where}: say where it is to run, as in provider = "lium".')
        specs.append(typed(PodSpec, {**usual_for(str(values["provider"])), **values}, where))
    name, number = Counter(spec.name for spec in specs).most_common(1)[0] if specs else ("", 0)
    if number > 1:
        raise UserError(f"{origin} has two pods named {name}.")
    for spec in specs:
        is_word = spec.name.replace("-", "").replace("_", "").isalnum() and spec.name.isascii()
        if not is_word or len(spec.name) > 40:
            raise UserError(
                f'"{spec.name}" is not a valid pod name: use up to 40 letters, digits and dashes.'
            )
    return specs


def usual_for(provider: str) -> dict[str, Any]:
    """Defaults other than PodSpec's for the user's own machines: any GPUs will do. Empty for other providers.

    Local pods share this machine's CPU, so each gets one training process.
    """
    names = set(_names(provider))
    if not names or not names <= OWN_MACHINES:
        return {}
    return {"gpu_count": None, "gpu_type": None if "ssh" in names else "cpu-1"}


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


def _names(provider: str) -> list[str]:
    return [name for name in provider.split(",") if name]
