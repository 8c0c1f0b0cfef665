"""One order in the ledger: a pod that is wanted, rented or being given back; its states, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from provisioning.pods.pod import Offer, Order, Pod, name_in_label
from provisioning.pods.spec import PodSpec


class State(StrEnum):
    PLANNED = "planned"
    """Chosen; nothing has been asked of the provider."""
    CREATING = "creating"
    """The request is about to be sent, or has been; there may be a pod."""
    BOOTING = "booting"
    """The provider has a pod; it costs money from here on."""
    REACHABLE = "reachable"
    """It answers, under its pinned host key."""
    SYNCED = "synced"
    """Code and environment are on it."""
    RUNNING = "running"
    """Its peer has been started."""
    DELETING = "deleting"
    """It is to be gone, and may cost money until its provider has said that it is."""
    GONE = "gone"
    """The provider has said that there is no such pod: the row only tells what it cost."""


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
    """Whether a pod may go from one state to the other. Staying is always allowed."""
    return old == new or new in _NEXT[old]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One order, and what is known of it: a pod that is wanted, rented, or being given back."""

    name: str
    """Of the pods of one name, one at most is not being given back."""
    label: str
    """As the order's: unlike the name, no other row has it."""
    spec: PodSpec
    offer: Offer
    ends_at: float | None
    """Unix time at which the pod is to be gone."""
    state: State
    provider_id: str | None
    asked_at: float
    """Unix time at which the order was written down before it was sent, or was answered."""
    host_key: str = ""
    absent_since: float | None = None
    """Unix time of the first list that lacked it; all lists since did."""
    num_absences: int = 0
    """How many lists that makes."""
    ended_at: float | None = None
    """Unix time at which its provider had said that there is no such pod."""

    @property
    def provider(self) -> str:
        return self.offer.provider

    @property
    def order(self) -> Order:
        return Order(
            label=self.label,
            offer=self.offer,
            ends_at=self.ends_at,
            image=self.spec.image,
            volume_id=self.spec.volume_id,
        )

    @property
    def is_in_doubt(self) -> bool:
        """Its order may have been sent, and nobody knows whether it made a pod."""
        return self.provider_id is None and self.state in (State.CREATING, State.DELETING)

    def dollars(self, now: float) -> float:
        """What it has cost."""
        until = now if self.ended_at is None else self.ended_at
        return max(until - self.asked_at, 0.0) / 3600 * self.offer.price_per_hour

    def is_pod(self, pod: Pod) -> bool:
        return pod.id == self.provider_id if self.provider_id is not None else pod.label == self.label


def stray(pod: Pod, provider: str, owner: str, now: float) -> Row:
    """A pod of ours that no row knows of, as a row: it is to be given back."""
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
