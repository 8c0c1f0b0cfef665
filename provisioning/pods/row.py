"""One row of the ledger: an order of a pod, its state, and its cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from provisioning.pods.pod import Offer, Pod, name_in_label
from provisioning.pods.spec import PodSpec


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
    State.RUNNING: {State.SYNCED, *_END},
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
    """At most one row of each name is not being deleted or gone."""
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
        """Whether the order may have been sent while it is unknown if it made a pod."""
        return self.provider_id is None and self.state in (State.CREATING, State.DELETING)

    def dollars(self, now: float) -> float:
        """The cost so far."""
        until = now if self.ended_at is None else self.ended_at
        return max(until - self.asked_at, 0.0) / 3600 * self.offer.price_per_hour

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
