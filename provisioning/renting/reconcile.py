"""Decides how to resolve each difference between the ledger and a provider. Pure.

Only pods of rows, and pods whose label begins with the owner's prefix, are ever touched. A listing proves that a pod
exists, never that it does not. A pod with a known id is gone when the provider says that this id does not exist. An
order whose answer was lost made no pod if several listings over `doubt_s` all lack it.
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
    """What a provider said about its pods at one time."""

    pods: Sequence[Pod]
    """Pods that are listed or were found by id."""
    gone: Collection[str] = ()
    """Ids of which the provider says that they do not exist."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Ids for which the request failed, and why."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Machines that did not answer, and why. They may have pods that are not in `pods`."""

    def pods_of(self, rows: Sequence[Row]) -> dict[str, Pod]:
        """The pod of each row, by label; if an order made two pods, one of them."""
        known = {row.provider_id for row in rows}
        free = [pod for pod in sorted(self.pods, key=lambda pod: pod.id) if pod.id not in known]
        found = {
            row.label: next(filter(row.is_pod, free if row.provider_id is None else self.pods), None)
            for row in rows
        }
        return {label: pod for label, pod in found.items() if pod is not None}

    def strays(self, rows: Sequence[Row], owner: str) -> list[Pod]:
        """Pods with our label prefix that belong to no row."""
        own = {pod.id for pod in self.pods_of(rows).values()}
        prefix = label_prefix(owner)
        return [pod for pod in self.pods if pod.id not in own and pod.label.startswith(prefix)]


class Do(StrEnum):
    ADOPT = "adopt"
    """The order has made this pod: record it in the row."""
    GIVE_UP = "give up"
    """No pod of the order was listed in time. If one appears later, it is given back."""
    COUNT_ABSENCE = "count absence"
    """One more listing lacks the pod of an order that was given up."""
    FORGET = "forget"
    """The pod does not exist: mark the row as gone."""
    DESTROY = "destroy"
    """Delete the pod."""


@dataclass(frozen=True)
class Action:
    do: Do
    row: Row
    pod: Pod | None = None
    reason: str = ""


def decide(rows: Sequence[Row], observation: Observation, provider: Provider, *, now: float) -> list[Action]:
    """The actions for one provider; empty if its pods agree with the rows."""
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
        elif row.state == State.PLANNED and row.ends_at is not None and now >= row.ends_at:
            # A command died before it ordered this pod.
            actions.append(Action(Do.FORGET, row, reason="its time is over, and it was never ordered"))
    return actions


def decidable_at(row: Row, provider: Provider, now: float) -> float:
    """The earliest Unix time at which it can be decided whether an order in doubt made a pod."""
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
        # A repeatable order is sent again: with the same label it makes the same pod.
        return [] if provider.repeatable else [Action(Do.GIVE_UP, row)]
    if row.num_absences + 1 >= _MIN_ABSENCES and now >= decidable_at(row, provider, now):
        return [Action(Do.FORGET, row, reason="its order made no pod")]
    return [Action(Do.COUNT_ABSENCE, row)]
