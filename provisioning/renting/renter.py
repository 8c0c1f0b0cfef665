"""From an order to a pod that answers, at one provider: every order is in the ledger before it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from provisioning.errors import (
    HostKeyChanged,
    MachineError,
    NoCapacity,
    OutcomeUnknown,
    ProviderError,
    ProvisioningError,
    ResultsNotFetched,
    UserError,
)
from provisioning.ledger.row import Row, State
from provisioning.machines.machine import Machine
from provisioning.machines.results import fetch_results
from provisioning.pods.pod import Pod
from provisioning.providers.backoff import repeated
from provisioning.renting.settler import Settler

RUN_DIR, FETCH = "run_dir", "fetch"
"""What the ledger remembers: where results go, and which."""


@dataclass(kw_only=True)
class Renter(Settler):
    """Rents and gives back the pods of one ledger at one provider. The caller holds the ledger's lock."""

    fetches: Sequence[str] | None = None
    """What is brought home of a pod before it is given back; None: what was said when it was rented."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.has_unclear = False
        """An order's answer was lost, and its pod may come yet."""
        self._machines: dict[str, Machine] = {}

    async def close(self) -> None:
        for machine in self._machines.values():
            await machine.close()
        self._machines.clear()

    async def until_reachable(self, row: Row) -> None:
        """Order it unless that is done, and wait until it answers. Raises NoCapacity where another offer may do."""
        if row.state in (State.PLANNED, State.CREATING):
            await self._rent(row)
        current = self.ledger.current(row)
        assert current is not None, row.label
        await self._boot(current)

    async def _rent(self, row: Row) -> None:
        """Send the order, once; where the answer is lost, look for the pod. Raises NoCapacity, ProviderError."""
        if row.provider_id is not None:
            # An earlier command had the answer, and died before it had seen the pod.
            await self.rented(row, await self.pod_of(row))
            return
        was_sent = row.state == State.CREATING
        row = self.ledger.advance(row, State.CREATING, asked_at=self.clock())
        try:
            # Unavailable means that it was not carried out, and is asked again; nothing else ever is.
            pod_id = await repeated(lambda: self.provider.create(row), tell=self.tell)
        except OutcomeUnknown as error:
            self.has_unclear = True
            row = self.ledger.advance(row, State.CREATING, asked_at=self.clock())
            self.say(row.name, f"no clear answer to the order ({error}); looking whether it got through")
        except (ProviderError, UserError):
            if was_sent:
                # That this one was refused says nothing of the one before it, whose answer was lost.
                self.ledger.advance(row, State.DELETING)
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
            self.ledger.advance(row, State.DELETING)
            raise NoCapacity("the answer to the order was lost, and no list shows a pod of it")
        await self.rented(row, pod)

    async def _appeared(self, row: Row) -> Pod | None:
        deadline = self.clock() + self.provider.settle_s + self.patience.poll_s
        while True:
            for pod in (await self.view.look([])).pods:
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
        self._machines[row.label] = machine
        if row.state == State.BOOTING:
            self.ledger.advance(row, State.REACHABLE)

    async def bring_home(self, row: Row, *, loses_results: bool = False) -> None:
        words = self.fetches if self.fetches is not None else self.ledger.recall(FETCH).split()
        if row.state not in (State.SYNCED, State.RUNNING) or not self.ledger.recall(RUN_DIR) or not words:
            return
        into, failure = self._home_of(row), ""
        try:
            pod = await self.pod_of(row)
            failure = pod.failure
            machine = await self.machine_of(row, replace(pod, is_ready=True, failure=""))
            number = await fetch_results(machine, row.label, words, into)
        except NoCapacity:
            self.say(row.name, "there is no such pod any more, so its results cannot be fetched")
        except ProvisioningError as error:
            text = f"its results could not be fetched: {error}"
            self.say(row.name, text)
            if not failure and not loses_results:
                raise ResultsNotFetched(
                    f"{text}. It is there still, for {row.offer.price_per_hour:.2f} $/h; `diloco pods down --yes "
                    f"{row.name}` gives it back without them."
                ) from error
        else:
            self.say(row.name, f"its results are in {into}" if number else "it has no results to be fetched")

    def _home_of(self, row: Row) -> str:
        """Where a pod's results go: this very pod's alone, where another one of its name had some."""
        into = f"{self.ledger.recall(RUN_DIR).rstrip('/')}/{row.name}"
        key = f"results:{into}"
        if self.ledger.recall(key) not in ("", row.label):
            return f"{into}-{row.label.rpartition('-')[2]}"
        self.ledger.remember(key, row.label)
        return into

    async def machine(self, row: Row) -> Machine:
        """The machine of a pod that has answered before. Raises MachineError, HostKeyChanged, UserError."""
        return self._machines.get(row.label) or await self.machine_of(row, await self.pod_of(row))

    async def machine_of(self, row: Row, pod: Pod) -> Machine:
        """The machine of this row, whose pod has been looked up."""
        if row.label not in self._machines:
            if pod.failure:
                raise MachineError(f"{row.name} has died: {pod.failure}")
            if not pod.is_ready:
                is_new = row.state in (State.CREATING, State.BOOTING)
                raise MachineError(f"{row.name} is not up {'yet' if is_new else 'any more'}")
            self._machines[row.label] = await self.provider.machine(pod, row.host_key)
        return self._machines[row.label]
