"""What providers speak of: offers, orders, and the pods that they list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Users' files of experiments take it from here, too.
from provisioning.pods.spec import PodSpec as PodSpec

PORTS = (30001, 30002, 30003)
"""TCP ports that a pod opens besides SSH: one for the DHT, two for its peer. Outside they may be others."""


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
    """One request for a pod: all that a provider is told of it."""

    label: str
    """The pod's name at the provider, new for each order, by which it is found again; and its idempotency key."""
    offer: Offer
    ends_at: float | None = None
    """Unix time at which the pod is to be gone."""
    image: str | None = None
    """Container image or template, where the provider takes one."""
    volume_id: str | None = None
    """A volume of the provider's to attach."""


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
    """Its IPv4 address, at which the other pods reach it too."""
    ssh_port: int = 22
    user: str = ""
    ports: tuple[tuple[int, int], ...] = ()
    """Those of PORTS, or others in their place: inside, and as they are reached from outside."""
    host_key: str = ""
    """OpenSSH public key of the machine, where the provider knows it."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The pods of an account, whosever they are. That one is missing proves nothing: lists are late, or cut short."""

    pods: Sequence[Pod]
    silent: Mapping[str, str] = field(default_factory=dict)
    """Machines that did not answer, and why: the pods on them are missing here."""


def listing(pods: Iterable[Pod | None]) -> Listing:
    """Of those that are there."""
    return Listing(pods=[pod for pod in pods if pod is not None])


def label_prefix(owner: str) -> str:
    """How the labels of all pods of one state file begin."""
    return f"diloco-{owner}-"


def name_in_label(label: str, owner: str) -> str:
    """The name of the pod that an order with this label was for."""
    return label.removeprefix(label_prefix(owner)).rpartition("-")[0] or label
