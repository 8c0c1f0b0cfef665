"""Requested pods, and the data of the provider protocol: offers, pods, listings, and rows, the ledger's orders."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from provisioning.errors import UserError
from provisioning.pods.tables import Figure, typed

OWN_MACHINES = frozenset({"local", "ssh"})
"""Providers of the user's own machines; all others rent."""
PORTS = (30001, 30002, 30003)
"""TCP ports that a pod opens besides SSH: one for the DHT, two for its peer. From outside, the numbers may differ."""

MANY = 100
"""Assumed number of pods that can be rented by one offer, if the provider does not say it."""

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
        """Dollars per hour that a replacement may cost, if the user agreed to an offer of `agreed` dollars per hour."""
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
    """Defaults that replace PodSpec's for the user's own machines: any GPUs will do. Empty for other providers.

    Local pods share this machine's CPU, so each gets one training process.
    """
    names = set(_names(provider))
    if not names or not names <= OWN_MACHINES:
        return {}
    return {"gpu_count": None, "gpu_type": None if "ssh" in names else "cpu-1"}


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A machine that can be rented now."""

    id: str
    provider: str
    gpu_type: str
    gpu_count: int
    price_per_hour: float
    """Dollars for the whole machine."""
    country: str | None = None
    city: str | None = None
    upload_mbps: float | None = None
    download_mbps: float | None = None
    spot: bool = False
    is_cpu: bool = False
    """It has no GPUs; `gpu_count` is the number of its training processes."""
    num_available: int = 1
    """How many pods can be rented by this offer at once."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Data that the provider needs to rent it."""

    def __post_init__(self) -> None:
        """Raises ValueError for an impossible price: negative, infinite or not a number."""
        if not _is_price(self.price_per_hour):
            raise ValueError(f"price_per_hour cannot be {self.price_per_hour!r:.80}")

    @property
    def key(self) -> str:
        """Unique among the offers of all providers."""
        return f"{self.provider}/{self.id}"

    @property
    def place(self) -> str:
        return ", ".join(filter(None, (self.city, self.country))) or "–"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod, as its provider describes it."""

    id: str
    label: str
    is_ready: bool
    """Its address is known, and the provider says that its system is up."""
    failure: str = ""
    """Why the pod will never be ready; empty: it has not failed."""
    gpu_count: int | None = None
    price_per_hour: float | None = None
    ends_at: float | None = None
    """Unix time at which the provider itself ends the rental; None: never, or unknown."""
    host: str = ""
    """Its IPv4 address, also for the other pods; "": unknown."""
    ssh_port: int = 22
    user: str = ""
    ports: tuple[tuple[int, int], ...] = ()
    """Pairs of a port on the pod, one of PORTS or a replacement, and its number from outside."""

    def __post_init__(self) -> None:
        """Raises ValueError without an id: such a pod could never be deleted. An invalid price becomes None."""
        if not self.id:
            raise ValueError("a pod has no id")
        if self.price_per_hour is not None and not _is_price(self.price_per_hour):
            object.__setattr__(self, "price_per_hour", None)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All pods of an account. A pod that is missing may still exist: listings lag behind, or are cut off."""

    pods: Sequence[Pod]
    silent: Mapping[str, str] = field(default_factory=dict)
    """Machines that did not answer, whose pods are therefore missing, and why."""


class State(StrEnum):
    PLANNED = "planned"
    """An offer was chosen; nothing was sent to the provider yet."""
    CREATING = "creating"
    """The order is about to be sent, or was sent; a pod may exist."""
    BOOTING = "booting"
    """The pod exists and costs money."""
    REACHABLE = "reachable"
    """It answers over SSH, with its pinned host key."""
    SYNCED = "synced"
    """Code and environment were sent to it."""
    RUNNING = "running"
    """Its peer has been started."""
    DELETING = "deleting"
    """It is being deleted, and may cost money until the provider says that it does not exist."""
    GONE = "gone"
    """The provider has said that it does not exist. The row is kept as a record of its cost."""


_END = {State.DELETING, State.GONE}
_NEXT = {
    State.PLANNED: {State.CREATING, State.GONE},
    State.CREATING: {State.BOOTING, *_END},
    State.BOOTING: {State.REACHABLE, *_END},
    State.REACHABLE: {State.SYNCED, *_END},
    State.SYNCED: {State.RUNNING, *_END},
    State.RUNNING: _END,
    State.DELETING: {State.GONE},
    State.GONE: set(),
}


def may_follow(old: State, new: State) -> bool:
    """Whether this change of state is allowed. Staying in a state always is."""
    return old == new or new in _NEXT[old]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One order of a pod."""

    name: str
    """Of all rows with one name, at most one is neither being deleted nor gone."""
    label: str
    """Unique among all rows: the pod's name at the provider, and the order's idempotency key."""
    spec: PodSpec
    offer: Offer
    ends_at: float | None
    """Unix time of the rental end; None: no end."""
    state: State
    provider_id: str | None
    asked_at: float
    """Unix time just before the order was sent, or after its answer arrived."""
    host_key: str = ""
    """The pinned host key, as an OpenSSH public key; "": not known yet."""
    absent_since: float | None = None
    """Unix time of the first listing that lacked the pod; None: no listing did."""
    num_absences: int = 0
    """Number of listings without the pod since then."""
    ended_at: float | None = None
    """Unix time at which the provider said that the pod does not exist."""

    @property
    def provider(self) -> str:
        return self.offer.provider

    @property
    def is_in_doubt(self) -> bool:
        """Whether the order may have been sent, and it is unknown whether it made a pod."""
        return self.provider_id is None and self.state in (State.CREATING, State.DELETING)

    def dollars(self, now: float) -> float:
        """The cost so far."""
        until = now if self.ended_at is None else self.ended_at
        return max(until - self.asked_at, 0.0) / 3600 * self.offer.price_per_hour

    def hours_left(self, now: float) -> float | None:
        """Until the rental end; None: it has none."""
        return None if self.ends_at is None else max(self.ends_at - now, 0.0) / 3600

    def is_pod(self, pod: Pod) -> bool:
        return pod.id == self.provider_id if self.provider_id is not None else pod.label == self.label


def stray(pod: Pod, provider: str, owner: str, now: float) -> Row:
    """A row for a stray: a pod whose label has our prefix, but which belongs to no row. It is to be given back."""
    name = name_in_label(pod.label, owner)
    offer = Offer(
        id="",
        provider=provider,
        gpu_type="unknown",
        gpu_count=pod.gpu_count or 0,
        price_per_hour=pod.price_per_hour or 0.0,
    )
    return Row(
        name=name,
        label=pod.label,
        state=State.DELETING,
        provider_id=pod.id,
        spec=PodSpec(name=name, provider=provider, gpu_type=None, gpu_count=None),
        offer=offer,
        asked_at=now,
        ends_at=None,
    )


def id_in(value: object) -> str:
    """An id in a provider's answer, as text. Raises ValueError if there is none: null is not the id "None"."""
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise ValueError(f"{value!r} is no id")
    return str(value)


def _is_price(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def label_prefix(owner: str) -> str:
    """The prefix of the labels of all orders of one state file."""
    return f"diloco-{owner}-"


def name_in_label(label: str, owner: str) -> str:
    """The name of the pod that was ordered with this label."""
    return label.removeprefix(label_prefix(owner)).rpartition("-")[0] or label


def _names(provider: str) -> list[str]:
    return [name for name in provider.split(",") if name]
