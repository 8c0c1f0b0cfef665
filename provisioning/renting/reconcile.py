"""Makes the ledger and a provider agree, also after a crash at any point: `decide`, which is pure, and `settle`.

Only pods of rows, and pods whose label begins with the owner's prefix, are ever touched. A listing proves that a pod
exists, never that it does not. A pod with a known id is gone when the provider says that this id does not exist. An
order whose answer was lost made no pod if several listings over `doubt_s` all lack it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from provisioning.errors import NoCapacity, ProviderError, ProvisioningError
from provisioning.pods.pod import Pod, Row, State, label_prefix
from provisioning.providers.backoff import repeated
from provisioning.providers.protocol import Provider
from provisioning.renting.each import Failures, each
from provisioning.renting.renter import Renter

_MIN_ABSENCES = 3
# For each transfer of results after the rental end, and for all with their waiting for each other, while the pod costs
# money; normally the watcher has fetched them some minutes before.
_LAST_FETCH_S, _LAST_FETCHES_S = 300.0, 600.0


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


async def observe(renter: Renter, rows: Sequence[Row]) -> Observation:
    """List the provider's pods, and look up each pod of `rows` that is missing there. Raises ProviderError."""
    listing = await repeated(renter.provider.pods, tell=renter.tell)
    pods = {pod.id: pod for pod in listing.pods}
    unlisted = [row.provider_id for row in rows if row.provider_id and row.provider_id not in pods]
    gone: set[str] = set()
    unknown: dict[str, str] = {}

    async def ask(pod_id: str) -> None:
        try:
            pod = await renter.find(pod_id)
        except ProvisioningError as error:
            unknown[pod_id] = str(error)
            return
        if pod is None:
            gone.add(pod_id)
        else:
            pods[pod.id] = pod

    await asyncio.gather(*(ask(pod_id) for pod_id in unlisted))
    return Observation(pods=list(pods.values()), gone=gone, unknown=unknown, silent=listing.silent)


async def record_strays(renter: Renter) -> Observation:
    """Observe the provider, and add a row for each stray, so that it is given back. Raises ProviderError."""
    observation = await observe(renter, renter.rows)
    # Read the rows again: pods that were ordered meanwhile have rows now.
    for pod in observation.strays(renter.rows, renter.ledger.owner):
        row = renter.ledger.found(pod, renter.provider.name, now=renter.clock())
        renter.say(row.name, f"{pod.id} has our label but is not in the state file: it is to be given back")
    return observation


async def settle(renter: Renter) -> Failures:
    """Make the ledger and the provider agree. Raises ProvisioningError.

    Looks for the pods of orders in doubt, gives back strays and pods after their rental end, and marks the rows of
    pods that do not exist as gone. Returns the errors by pod or machine.
    """
    # Several tasks that give back pods may call this at once; later calls then find little to do.
    async with renter.settling:
        return await _settle(renter)


async def _settle(renter: Renter) -> Failures:
    provider, clock = renter.provider, renter.clock
    deadline = clock() + provider.settle_s + renter.patience.destroy_s
    for row in renter.rows:
        renter.dated(row)
    while True:
        observation = await record_strays(renter)
        rows = renter.rows
        failures: Failures = {machine: ProviderError(why) for machine, why in observation.silent.items()}
        for row in rows:
            if why := observation.unknown.get(row.provider_id or ""):
                failures[row.name] = ProviderError(
                    f"it is not known whether it is still there, so it may cost money: {why}"
                )
        actions = decide(rows, observation, provider, now=clock())
        failures |= await each(
            actions, lambda action: _carry_out(renter, action), name=lambda action: action.row.name
        )
        orders = [
            row
            for row in renter.rows
            if row.is_in_doubt
            and not (row.state == State.CREATING and provider.repeatable)
            and decidable_at(row, provider, clock()) <= deadline
        ]
        if not orders or observation.silent or clock() > deadline:
            return failures
        renter.say(orders[0].name, "looking for the pod of an order whose answer was lost")
        await asyncio.sleep(renter.patience.poll_s)


async def _carry_out(renter: Renter, action: Action) -> None:
    row, pod, ledger = action.row, action.pod, renter.ledger
    if ledger.current(row) != row:
        # The row has changed since the observation: the next observation decides about it.
        return
    if action.do == Do.ADOPT and pod is not None:
        if row.state == State.PLANNED:
            row = ledger.advance(row, State.CREATING)
        renter.say(row.name, f"the order was carried out: its pod is {pod.id}")
        # NoCapacity: the pod differs from the order, and was given back.
        with contextlib.suppress(NoCapacity):
            await renter.read_back(row, pod)
    elif action.do == Do.GIVE_UP:
        renter.say(row.name, "its order is given up; if its pod appears later, it is given back")
        ledger.advance(row, State.DELETING)
    elif action.do == Do.COUNT_ABSENCE:
        ledger.count_absence(row, now=renter.clock())
    elif action.do == Do.FORGET:
        renter.say(row.name, action.reason)
        ledger.forget(row, now=renter.clock())
    elif action.do == Do.DESTROY and pod is not None:
        renter.say(row.name, f"given back: {action.reason}")
        # The rental is over, even if the results cannot be fetched.
        try:
            async with asyncio.timeout(_LAST_FETCHES_S):
                await renter.fetch_results(row, discard_results=True, limit_s=_LAST_FETCH_S)
        except TimeoutError:
            renter.say(row.name, "of its results, what did not arrive within minutes of its end is lost")
        # Meanwhile another task may have given it back, or a command may have extended its rental.
        current = ledger.current(row)
        if current is None or current.ends_at != row.ends_at:
            return
        if current.provider_id is None:
            row = ledger.set_pod(current, pod.id, pod.price_per_hour, State.DELETING)
        else:
            row = ledger.advance(current, State.DELETING)
        await renter.end(row)
