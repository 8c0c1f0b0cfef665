"""What to do about every difference between the ledger and what a provider says: a pure decision.

Only pods that a row names, or whose label begins with the owner's prefix, are ever touched. A list proves that a pod is
there, never that it is not: a pod whose id is known is gone when the provider says so of that id, and an order whose
answer was lost made no pod when several lists over `doubt_s` agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from provisioning.ledger.row import Row, State
from provisioning.pods.pod import Pod, label_prefix

_MIN_ABSENCES = 3


@dataclass(frozen=True, kw_only=True)
class Look:
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


@dataclass(frozen=True)
class Adopt:
    """The order did get through: this is its pod."""

    row: Row
    pod: Pod


@dataclass(frozen=True)
class GiveUp:
    """No pod of this order was listed in time: if one comes yet, it is given back."""

    row: Row


@dataclass(frozen=True)
class Missed:
    """One more list lacks the pod of an order that was given up; until `until` (Unix time) one may come."""

    row: Row
    until: float


@dataclass(frozen=True)
class Wait:
    """Too early to say whether there is a pod; look again at `until` (Unix time)."""

    row: Row
    until: float


@dataclass(frozen=True)
class Forget:
    """There is no such pod: the row can go."""

    row: Row
    reason: str


@dataclass(frozen=True)
class Destroy:
    """A pod that must not be there any more."""

    row: Row
    pod: Pod
    reason: str


@dataclass(frozen=True)
class DestroyStray:
    """A pod of ours that no row knows of."""

    pod: Pod
    reason: str


Action = Adopt | GiveUp | Missed | Wait | Forget | Destroy | DestroyStray


def decide(
    rows: Sequence[Row],
    look: Look,
    *,
    owner: str,
    now: float,
    settle_s: float,
    doubt_s: float,
    repeatable: bool,
) -> list[Action]:
    """All that has to be done for one provider; nothing where ledger and provider agree.

    `settle_s`, `doubt_s`, `repeatable`: as its provider has them.
    """
    actions: list[Action] = []
    pods = look.pods_of(rows)
    for row in rows:
        pod = pods.get(row.label)
        if pod is not None:
            actions += _about_pod(row, pod, now)
        elif row.provider_id is not None:
            if row.provider_id in look.gone:
                actions.append(_about_gone(row, now, settle_s))
        elif row.is_in_doubt and not look.silent:
            actions += _about_order(row, now, settle_s, doubt_s, repeatable)
    labels = {row.label for row in rows}
    for pod in look.strays(rows, owner):
        reason = "ordered twice" if pod.label in labels else "ours, but in no row of the state file"
        actions.append(DestroyStray(pod, reason))
    return actions


def _about_pod(row: Row, pod: Pod, now: float) -> list[Action]:
    if row.state == State.DELETING:
        return [Destroy(row, pod, "to be given back")]
    if row.ends_at is not None and now >= row.ends_at:
        return [Destroy(row, pod, "its time is over")]
    return [Adopt(row, pod)] if row.state in (State.PLANNED, State.CREATING) else []


def _about_gone(row: Row, now: float, settle_s: float) -> Action:
    if now < row.asked_at + settle_s:
        return Wait(row, row.asked_at + settle_s)
    return Forget(row, "gone" if row.state == State.DELETING else "vanished: there is no such pod any more")


def _about_order(row: Row, now: float, settle_s: float, doubt_s: float, repeatable: bool) -> list[Action]:
    if row.state == State.CREATING and repeatable:
        # Sent again under its key, it makes the same pod.
        return []
    if now < row.asked_at + settle_s:
        return [Wait(row, row.asked_at + settle_s)]
    if row.state == State.CREATING:
        return [GiveUp(row)]
    since = now if row.absent_since is None else row.absent_since
    if row.num_absences + 1 >= _MIN_ABSENCES and now >= since + doubt_s:
        return [Forget(row, "its order made no pod")]
    return [Missed(row, since + doubt_s)]
