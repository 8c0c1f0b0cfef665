"""From a plan to pods that answer: every order is in the ledger before it is sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from provisioning.backoff import repeated
from provisioning.choice import candidates
from provisioning.errors import (
    HostKeyChanged,
    MachineError,
    NoCapacity,
    OutcomeUnknown,
    ProviderError,
    ProvisioningError,
    UserError,
)
from provisioning.ledger import Row
from provisioning.machines import Machine
from provisioning.plan import Plan
from provisioning.pods import Offer, Pod, PodSpec
from provisioning.settling import Settler, gathered
from provisioning.states import State

_MAX_OFFERS = 4
# Without a price limit, the next offer may cost so many times what was confirmed.
_DEARER = 1.5


@dataclass(kw_only=True)
class Renter(Settler):
    """Rents and gives back the pods of one ledger at one provider. The caller holds the ledger's lock."""

    public_key: str
    on_planned: Callable[[], None] = lambda: None
    """All that is to be ordered is written down, and nothing has been ordered yet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._taken: Counter[str] = Counter()
        self._has_unclear = False
        self._machines: dict[str, Machine] = {}

    async def close(self) -> None:
        for machine in self._machines.values():
            await machine.close()
        self._machines.clear()

    async def apply(self, plan: Plan, offers: Sequence[Offer]) -> dict[str, ProvisioningError]:
        """Give back, then rent in parallel, until all answer. What went wrong, by pod; the others are not held up."""
        failures: dict[str, ProvisioningError] = {}

        async def attempt(name: str, work: Awaitable[object]) -> None:
            try:
                await work
            except ProvisioningError as error:
                failures[name] = error
                self.say(name, f"failed: {error}")

        await gathered(attempt(removal.row.name, self.give_back(removal.row)) for removal in plan.destroy)
        creations = [creation for creation in plan.create if creation.spec.name not in failures]
        for creation in creations:
            self._plan(creation.spec, creation.offer)
        self._taken.update(creation.offer.id for creation in creations)
        self.on_planned()
        await gathered(
            [
                *(attempt(item.spec.name, self._until_reachable(item.spec, offers)) for item in creations),
                *(attempt(row.name, self._until_reachable(row.spec, offers)) for row in plan.keep),
            ]
        )
        if self._has_unclear:
            # A pod of an order that was given up may have come after all.
            return await self.settle() | failures
        return failures

    def _plan(self, spec: PodSpec, offer: Offer) -> Row:
        now = self.clock()
        ends_at = now + spec.ttl_hours * 3600 if spec.ttl_hours is not None else None
        row = self.ledger.plan(spec, offer, now=now, ends_at=ends_at)
        self.on_state(row.name, State.PLANNED)
        return row

    async def _until_reachable(self, spec: PodSpec, offers: Sequence[Offer]) -> None:
        """Try offers until one of them answers. Raises the last reason."""
        confirmed = self._row(spec.name).offer.price_per_hour
        tried: set[str] = set()
        for _ in range(_MAX_OFFERS):
            row = self._row(spec.name)
            tried.add(row.offer.id)
            try:
                if row.state in (State.PLANNED, State.CREATING):
                    await self._rent(row)
                await self._boot(self._row(spec.name))
                return
            except NoCapacity as error:
                reason = str(error)
            current = self.ledger.row(spec.name)
            if current and not current.is_in_doubt:
                await self.give_back(current)
            limit = spec.max_price if spec.max_price is not None else confirmed * _DEARER
            left = [
                offer
                for offer in candidates(spec, offers, without=tried)
                if offer.price_per_hour <= limit and self._taken[offer.id] < offer.num_available
            ]
            if not left:
                raise NoCapacity(f"{reason}; no other offer fits")
            self.say(
                spec.name, f"{reason}; the next offer is {left[0].id} for {left[0].price_per_hour:.2f} $/h"
            )
            self._taken[left[0].id] += 1
            self._plan(spec, left[0])
        raise NoCapacity(f"{_MAX_OFFERS} offers in turn came to nothing, the last one because {reason}")

    async def _rent(self, row: Row) -> None:
        """Send the order, once; where the answer is lost, look for the pod. Raises NoCapacity, ProviderError."""
        if row.provider_id is not None:
            # An earlier command had the answer, and died before it had seen the pod.
            await self.rented(row, await self.pod_of(row))
            return
        was_sent = row.state == State.CREATING
        row = self.advance(row, State.CREATING, asked_at=self.clock())
        try:
            # Unavailable means that it was not carried out, and is asked again; nothing else ever is.
            order = row.order(self.public_key)
            pod_id = await repeated(lambda: self.provider.create(order), tell=self.tell)
        except OutcomeUnknown as error:
            self._has_unclear = True
            row = self.advance(row, State.CREATING, asked_at=self.clock())
            self.say(row.name, f"no clear answer to the order ({error}); looking whether it got through")
        except (ProviderError, UserError):
            if was_sent:
                # That this one was refused says nothing of the one before it, whose answer was lost.
                self.advance(row, State.DELETING)
            else:
                self.ledger.forget(row, now=self.clock())
            raise
        else:
            price = row.offer.price_per_hour
            # It may have been asked several times, which takes a while.
            row = self.ledger.rented(row, pod_id, price, State.CREATING, asked_at=self.clock())
            await self.rented(row, await self.pod_of(row))
            return
        pod = await self._appeared(row)
        if pod is None:
            # It may come yet, and is given back then.
            self.advance(row, State.DELETING)
            raise NoCapacity("the answer to the order was lost, and no list shows a pod of it")
        await self.rented(row, pod)

    async def _appeared(self, row: Row) -> Pod | None:
        deadline = self.clock() + self.provider.settle_s + self.patience.poll_s
        while True:
            for pod in (await self.view.listing(fresh=True)).pods:
                if row.is_pod(pod):
                    return pod
            if self.clock() > deadline:
                return None
            await asyncio.sleep(self.patience.poll_s)

    async def _boot(self, row: Row) -> None:
        """Until it answers under its host key; NoCapacity where this pod will not."""
        deadline = self.clock() + self.patience.boot_s
        why = "it did not come up"
        while True:
            pod = await self.pod_of(row)
            if pod.failure:
                raise NoCapacity(f"{pod.id}: {pod.failure}")
            if pod.is_ready:
                try:
                    await self._contact(row, pod)
                    return
                except HostKeyChanged:
                    raise
                except MachineError as error:
                    why = str(error)
            if self.clock() > deadline:
                if row.state != State.BOOTING:
                    raise MachineError(f"{pod.id} no longer answers: {why}")
                raise NoCapacity(f"{pod.id} was not up within {self.patience.boot_s:g} s: {why}")
            await asyncio.sleep(self.patience.poll_s)

    async def _contact(self, row: Row, pod: Pod) -> None:
        key = row.host_key or await self.provider.host_key(pod)
        if not row.host_key and key:
            # Pinned before anything is sent.
            self.ledger.advance(row, row.state, host_key=key)
        machine = await self.provider.machine(pod, key)
        (await machine.run("true")).checked("the first command")
        self._machines[row.name] = machine
        if row.state == State.BOOTING:
            self.advance(row, State.REACHABLE)

    async def machine(self, name: str) -> Machine:
        """The machine of a pod that has answered before. Raises MachineError, HostKeyChanged, UserError."""
        row = self._row(name)
        return self._machines.get(name) or await self.machine_of(row, await self.pod_of(row))

    async def machine_of(self, row: Row, pod: Pod) -> Machine:
        """The machine of this row, whose pod has been looked up."""
        if row.name not in self._machines:
            if pod.failure:
                raise MachineError(f"{row.name} has died: {pod.failure}")
            if not pod.is_ready:
                is_new = row.state in (State.CREATING, State.BOOTING)
                raise MachineError(f"{row.name} is not up {'yet' if is_new else 'any more'}")
            self._machines[row.name] = await self.provider.machine(pod, row.host_key)
        return self._machines[row.name]

    async def pod(self, name: str) -> Pod:
        return await self.pod_of(self._row(name))

    def _row(self, name: str) -> Row:
        row = self.ledger.row(name)
        if row is None:
            raise UserError(f"There is no pod {name}; `diloco pods status` lists them.")
        return row
