"""What to do about every difference between the ledger and what a provider says: a pure decision.

Only pods that a row names, or whose label begins with the owner's prefix, are ever touched. A list proves that a pod is
there, never that it is not: a pod whose id is known is gone when the provider says so of that id, and an order whose
answer was lost made no pod when several lists over `doubt_s` agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from provisioning.ledger.row import Row, State
from provisioning.pods.pod import Pod, label_prefix
from provisioning.providers.protocol import Provider

_MIN_ABSENCES = 3


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a provider said, all at one time."""

    pods: Sequence[Pod]
    """Listed, or found by id."""
    gone: Collection[str] = ()
    """Ids of which it says that there is no such pod."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Ids of which it said nothing, and why."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Machines that did not answer, and why: an order may have made a pod on them."""

    def pods_of(self, rows: Sequence[Row]) -> dict[str, Pod]:
        """The pod of each row, by the row's label; of two that one order made, either."""
        known = {row.provider_id for row in rows}
        free = [pod for pod in sorted(self.pods, key=lambda pod: pod.id) if pod.id not in known]
        found = {
            row.label: next(filter(row.is_pod, free if row.provider_id is None else self.pods), None)
            for row in rows
        }
        return {label: pod for label, pod in found.items() if pod is not None}

    def strays(self, rows: Sequence[Row], owner: str) -> list[Pod]:
        """Pods with labels of ours that belong to no row."""
        own = {pod.id for pod in self.pods_of(rows).values()}
        prefix = label_prefix(owner)
        return [pod for pod in self.pods if pod.id not in own and pod.label.startswith(prefix)]


class Do(StrEnum):
    ADOPT = "adopt"
    """The order did get through: this is its pod."""
    GIVE_UP = "give up"
    """No pod of this order was listed in time: if one comes yet, it is given back."""
    COUNT_ABSENCE = "count absence"
    """One more list lacks the pod of an order that was given up."""
    FORGET = "forget"
    """There is no such pod."""
    DESTROY = "destroy"
    """A pod that must not be there any more."""


@dataclass(frozen=True)
class Action:
    do: Do
    row: Row
    pod: Pod | None = None
    reason: str = ""


def decide(rows: Sequence[Row], observation: Observation, provider: Provider, *, now: float) -> list[Action]:
    """All that has to be done for one provider; nothing where ledger and provider agree."""
    actions: list[Action] = []
    pods = observation.pods_of(rows)
    for row in rows:
        pod, is_new = pods.get(row.label), now < row.asked_at + provider.settle_s
        if pod is not None:
            actions += _about_pod(row, pod, now)
        elif row.provider_id is not None:
            if row.provider_id in observation.gone and not is_new:
                what = "gone" if row.state == State.DELETING else "vanished: there is no such pod any more"
                actions.append(Action(Do.FORGET, row, reason=what))
        elif row.is_in_doubt and not observation.silent and not is_new:
            actions += _about_order(row, provider, now)
    return actions


def decidable_at(row: Row, provider: Provider, now: float) -> float:
    """When at the earliest it can be said whether an order in doubt made a pod (Unix time)."""
    settled_at = row.asked_at + provider.settle_s
    if row.state == State.CREATING:
        return settled_at
    return max(settled_at, (now if row.absent_since is None else row.absent_since) + provider.doubt_s)


def _about_pod(row: Row, pod: Pod, now: float) -> list[Action]:
    if row.state == State.DELETING:
        return [Action(Do.DESTROY, row, pod, "to be given back")]
    if row.ends_at is not None and now >= row.ends_at:
        return [Action(Do.DESTROY, row, pod, "its time is over")]
    return [Action(Do.ADOPT, row, pod)] if row.state in (State.PLANNED, State.CREATING) else []


def _about_order(row: Row, provider: Provider, now: float) -> list[Action]:
    if row.state == State.CREATING:
        # Sent again under its label, it makes the same pod where orders are repeatable.
        return [] if provider.repeatable else [Action(Do.GIVE_UP, row)]
    if row.num_absences + 1 >= _MIN_ABSENCES and now >= decidable_at(row, provider, now):
        return [Action(Do.FORGET, row, reason="its order made no pod")]
    return [Action(Do.COUNT_ABSENCE, row)]
