"""What is asked for, what is offered, and what a provider says is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from msgspec import Meta

Figure = Annotated[float, Meta(ge=0, lt=1e12)]
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
        return tuple(name for name in self.provider.split(",") if name)

    def same_machine(self, other: PodSpec) -> bool:
        """Whether a pod rented for the one serves as the other."""
        names = {item.name for item in fields(self)} - _TERMS
        return all(getattr(self, name) == getattr(other, name) for name in names)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Something that can be rented."""

    id: str
    provider: str
    gpu_type: str
    gpu_count: int
    price_per_hour: float
    """Dollars for all of it."""
    country: str | None = None
    city: str | None = None
    upload_mbps: float | None = None
    download_mbps: float | None = None
    spot: bool = False
    is_cpu: bool = False
    """Its `gpu_count` counts training processes on processors."""
    num_available: int = 1
    """How many pods of this offer can be had at once."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What its provider needs to rent it."""

    @property
    def key(self) -> str:
        """Its id among those of all providers."""
        return f"{self.provider}/{self.id}"


@dataclass(frozen=True, kw_only=True)
class Order:
    """One request for a pod, as it was written down before it is sent."""

    label: str
    """The pod's name at the provider, new for each order, by which it is found again; and its idempotency key."""
    spec: PodSpec
    offer: Offer
    ends_at: float | None
    """Unix time at which the pod is to be gone."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod as its provider lists it."""

    id: str
    label: str
    is_ready: bool
    """Its address is known and its system is said to be up."""
    failure: str = ""
    """Why it will never be ready."""
    gpu_count: int | None = None
    price_per_hour: float | None = None
    ends_at: float | None = None
    """When the provider itself takes it back."""
    host: str = ""
    ssh_port: int = 22
    user: str = ""
    ports: tuple[tuple[int, int], ...] = ()
    """TCP ports that peers may use: inside, and as they are reached from outside."""
    host_key: str = ""
    """OpenSSH public key of the machine, where the provider knows it."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The pods of an account, whosever they are. That one is missing proves nothing: lists are late, or cut short."""

    pods: Sequence[Pod]
    silent: Mapping[str, str] = field(default_factory=dict)
    """Machines that did not answer, and why: the pods on them are missing here."""


def label_prefix(owner: str) -> str:
    """How the labels of all pods of one state file begin."""
    return f"diloco-{owner}-"


def name_in_label(label: str, owner: str) -> str:
    """The name of the pod that an order with this label was for."""
    return label.removeprefix(label_prefix(owner)).rpartition("-")[0] or label
