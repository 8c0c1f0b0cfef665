"""What to do about every difference between the ledger and what a provider lists: a pure decision.

Only pods whose label begins with the owner's prefix are ever touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from provisioning.ledger import Row
from provisioning.pods import Pod, label_prefix
from provisioning.states import State


@dataclass(frozen=True)
class Adopt:
    """The order did get through: this is its pod."""

    row: Row
    pod: Pod


@dataclass(frozen=True)
class Reorder:
    """There is no pod of this order, and none will appear: it may be sent (again)."""

    row: Row


@dataclass(frozen=True)
class Wait:
    """Too early to say whether there is a pod; look again at `until` (Unix time)."""

    row: Row
    until: float


@dataclass(frozen=True)
class Forget:
    """The provider does not list it, and will not: the row can go."""

    row: Row
    reason: str


@dataclass(frozen=True)
class Destroy:
    """A pod of ours that must not be there."""

    pod: Pod
    row: Row | None
    """None: no row knows of it."""
    reason: str


Action = Adopt | Reorder | Wait | Forget | Destroy


def decide(
    rows: Sequence[Row],
    listed: Sequence[Pod],
    *,
    owner: str,
    now: float,
    settle_s: float,
    repeatable: bool,
) -> list[Action]:
    """All that has to be done for one provider; nothing where ledger and provider agree.

    `settle_s`: how long after an order its pod may be missing from the list. `repeatable`: an order sent twice under
    one key makes one pod.
    """
    actions: list[Action] = []
    claimed: set[str] = set()
    for row in rows:
        found = sorted((pod for pod in listed if row.is_pod(pod)), key=lambda pod: pod.id)
        claimed.update(pod.id for pod in found)
        # The one that the ledger names; of two that it does not, either.
        own = next((pod for pod in found if pod.id == row.provider_id), found[0] if found else None)
        actions += [Destroy(pod, None, "ordered twice") for pod in found if pod is not own]
        actions += _about(row, own, now, settle_s, repeatable)
    prefix = label_prefix(owner)
    actions += [
        Destroy(pod, None, "ours, but in no row of the state file")
        for pod in listed
        if pod.id not in claimed and pod.label.startswith(prefix)
    ]
    return actions


def _about(row: Row, pod: Pod | None, now: float, settle_s: float, repeatable: bool) -> list[Action]:
    settled_at = row.asked_at + settle_s
    if pod is not None:
        if row.state == State.DELETING:
            return [Destroy(pod, row, "to be given back")]
        if row.ends_at is not None and now >= row.ends_at:
            return [Destroy(pod, row, "its time is over")]
        return [Adopt(row, pod)] if row.state in (State.PLANNED, State.CREATING) else []
    if row.state == State.PLANNED:
        return []
    if row.state == State.CREATING:
        return [Reorder(row)] if repeatable or now >= settled_at else [Wait(row, settled_at)]
    if now < settled_at and (row.state != State.DELETING or row.provider_id is None):
        return [Wait(row, settled_at)]
    if row.state == State.DELETING:
        return [Forget(row, "gone")]
    return [Forget(row, "vanished: the provider no longer lists it")]
