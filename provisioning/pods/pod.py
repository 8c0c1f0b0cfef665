"""The data of the provider protocol: offers, pods and listings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PORTS = (30001, 30002, 30003)
"""TCP ports that a pod opens besides SSH: one for the DHT, two for its peer. From outside, the numbers may differ."""

MANY = 100
"""How many pods an offer is good for whose provider does not say it."""


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
        """Raises ValueError for a price that nobody can have meant."""
        if not _is_price(self.price_per_hour):
            raise ValueError(f"price_per_hour cannot be {self.price_per_hour!r:.80}")

    @property
    def key(self) -> str:
        """Unique among the offers of all providers."""
        return f"{self.provider}/{self.id}"


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A pod, as its provider describes it."""

    id: str
    label: str
    is_ready: bool
    """Its address is known, and the provider says that its system is up."""
    failure: str = ""
    """Why it will never be ready; empty: it may be."""
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
        """Raises ValueError without an id: such a pod could never be deleted. An invalid price is unknown."""
        if not self.id:
            raise ValueError("a pod has no id")
        if self.price_per_hour is not None and not _is_price(self.price_per_hour):
            object.__setattr__(self, "price_per_hour", None)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All pods of an account. A missing pod proves nothing: listings lag behind, or are cut off."""

    pods: Sequence[Pod]
    silent: Mapping[str, str] = field(default_factory=dict)
    """Machines that did not answer, whose pods are therefore missing, and why."""


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
