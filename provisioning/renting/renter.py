"""Rents pods at one provider until they answer, and gives them back until the provider says that they do not exist.

Every order is in the ledger before it is sent. After a crash, `settle` finishes what was left half done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from dataclasses import dataclass

from provisioning.errors import (
    HostKeyChanged,
    MachineError,
    NoCapacity,
    OutcomeUnknown,
    ProviderError,
    ProvisioningError,
    UserError,
)
from provisioning.ledger.row import Row, State
from provisioning.pods.pod import Pod
from provisioning.providers.backoff import repeated
from provisioning.renting.account import Account
from provisioning.renting.each import Failures, each
from provisioning.renting.reconcile import Action, Do, Observation, decidable_at, decide

# For rounded cents. A pod that costs more than the user agreed to is given back.
_PRICE_SLACK = 1.02
_END_SLACK_S = 600.0
# For fetching results after the rental end; normally the watcher has fetched them some minutes before.
_LAST_FETCH_S = 300.0


@dataclass(kw_only=True)
class Renter(Account):
    """Rents and gives back the pods of one ledger at one provider. The caller holds the ledger's lock."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settling = asyncio.Lock()
        self._ordering = asyncio.Lock()

    async def until_reachable(self, row: Row) -> None:
        """Order the pod unless it is ordered, and wait until it answers. Raises NoCapacity if another offer may do."""
        if row.state in (State.PLANNED, State.CREATING):
            await self._rent(row)
        current = self.ledger.current(row)
        assert current is not None, row.label
        await self._boot(current)

    async def _rent(self, row: Row) -> None:
        """Send the order once; if its answer is lost, look for the pod in listings. Raises a ProviderError."""
        if row.provider_id is not None:
            # An earlier command received the answer, and died before it found the pod.
            await self._read_back(row, await self.pod_of(row))
            return
        was_sent = row.state == State.CREATING
        try:
            async with self._ordering:
                # Only now: a command that ends before leaves no order in doubt that was never sent.
                row = self.ledger.advance(row, State.CREATING, asked_at=self.clock())
                # Only Unavailable is repeated: it says that the order was not carried out.
                pod_id = await repeated(
                    lambda: self.provider.create(row.order), tell=self.tell, unexpected=OutcomeUnknown
                )
        except OutcomeUnknown as error:
            row = self.ledger.advance(row, State.CREATING, asked_at=self.clock())
            self.say(row.name, f"the answer to the order was lost ({error}); looking for its pod")
        except (ProviderError, UserError):
            if was_sent:
                # An earlier command sent the order, too, and its answer was lost: that one may have made a pod.
                self.ledger.advance(row, State.DELETING)
            else:
                self.ledger.forget(row, now=self.clock())
            raise
        else:
            # With the time of now: repeated requests take a while.
            row = self.ledger.set_pod(row, pod_id, None, State.CREATING, asked_at=self.clock())
            await self._read_back(row, await self.pod_of(row))
            return
        pod = await self._appeared(row)
        if pod is None:
            # If the pod appears later, it is given back.
            self.ledger.advance(row, State.DELETING)
            raise NoCapacity("the answer to the order was lost, and no listing shows its pod")
        await self._read_back(row, pod)

    async def _appeared(self, row: Row) -> Pod | None:
        deadline = self.clock() + self.provider.settle_s + self.patience.poll_s
        while True:
            for pod in (await self.observe([])).pods:
                if row.is_pod(pod):
                    return pod
            if self.clock() > deadline:
                return None
            await asyncio.sleep(self.patience.poll_s)

    async def _boot(self, row: Row) -> None:
        """Wait until the pod answers with its host key. Raises NoCapacity if a new pod fails or is not up in time."""
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
            # Pin it before anything is sent.
            self.ledger.advance(row, row.state, host_key=key)
        machine = await self.provider.machine(pod, key)
        (await machine.run("true")).checked("the first command")
        self._machines[row.label] = machine
        if row.state == State.BOOTING:
            self.ledger.advance(row, State.REACHABLE)

    async def _read_back(self, row: Row, pod: Pod) -> None:
        """Compare the pod with the order. A pod that differs is given back at once, and raises NoCapacity."""
        ordered, row = row, self.ledger.set_pod(row, pod.id, pod.price_per_hour)
        price, offered = row.offer.price_per_hour, ordered.offer.price_per_hour
        wrong = _wrong(ordered, pod, price)
        if price > offered * _PRICE_SLACK and not wrong:
            self.say(row.name, f"costs {price:.2f} $/h now, not {offered:.2f} as offered")
        if wrong:
            self.say(row.name, f"{self.provider.name} rented {wrong}; giving it back")
            await self.give_back(row)
            raise NoCapacity(f"{self.provider.name} rented {wrong}, and it was given back")
        await self.schedule_end(row)

    async def schedule_end(self, row: Row) -> None:
        """Set the rental end at the provider, if it supports that. Prints a message if it does not confirm the end."""
        if row.ends_at is None or not self.provider.keeps_time:
            return
        pod = await self.pod_of(row)
        if _ends_at(pod, row.ends_at):
            return
        await repeated(functools.partial(self.provider.set_end, pod.id, row.ends_at))
        deadline = self.clock() + self.provider.settle_s
        # By id, since listings lag behind.
        while not _ends_at(await self.find(pod.id), row.ends_at):
            if self.clock() > deadline:
                self.say(
                    row.name,
                    f"{self.provider.name} does not confirm its rental end; this machine will end it on time",
                )
                return
            await asyncio.sleep(self.patience.poll_s)

    async def give_back(self, row: Row, *, discard_results: bool = False) -> None:
        """Fetch the results, delete the pod, and wait until the provider says that it does not exist.

        May be repeated, also by several tasks at once. Raises ProviderError, which says what the user should do, or
        ResultsNotFetched; then the pod is kept.
        """
        current = self.ledger.current(row)
        if current is None:
            return
        if current.state == State.PLANNED:
            self._forget(current)
            return
        await self.fetch_results(current, discard_results=discard_results)
        try:
            row = self.ledger.advance(self._dated(current), State.DELETING)
        except UserError:
            # Delete the pod even if the disk is full. A later `settle` updates the ledger.
            if current.provider_id is not None:
                await self._destroy(current.provider_id)
            raise
        if row.provider_id is not None:
            await self._end(row)
            return
        failures = await self.settle()
        left = self.ledger.current(row)
        if left is not None:
            raise failures.get(row.name) or ProviderError(
                f"NOBODY KNOWS YET WHETHER THE ORDER {row.label} MADE A POD AT {self.provider.name.upper()} THAT COSTS "
                "MONEY: its answer was lost, and no list has shown one. `diloco pods reconcile` looks again, and gives "
                "it back if it comes."
            )

    def _identified(self, row: Row, pod: Pod) -> Row:
        """Mark the row as being deleted, with the id of its pod."""
        if row.provider_id is not None:
            return self.ledger.advance(row, State.DELETING)
        return self.ledger.set_pod(row, pod.id, pod.price_per_hour, State.DELETING)

    async def _end(self, row: Row) -> None:
        """Request the deletion by id, until the provider says that the pod does not exist. Listings do not count."""
        deadline = max(
            self.clock() + self.patience.destroy_s, self._settled_at(row) + 2 * self.patience.poll_s
        )
        said = ""
        while (trouble := await self._deleted(row)) is not None:
            if isinstance(trouble, UserError) or self.clock() > deadline:
                raise ProviderError(
                    f"POD {row.name} ({row.provider_id}) OF {self.provider.name.upper()} IS NOT KNOWN TO BE GONE AND "
                    f"MAY COST MONEY: {trouble}. `diloco pods down` tries again; or end it on the provider's web site."
                )
            if str(trouble) != said:
                said = str(trouble)
                self.say(row.name, f"not given back yet: {said}")
            await asyncio.sleep(self.patience.poll_s)
        self._forget(row)
        self.say(row.name, "given back")

    async def _deleted(self, row: Row) -> ProvisioningError | None:
        """Request the deletion once, and check the result. None: the pod is gone; else why it may not be."""
        pod_id = row.provider_id
        assert pod_id is not None and row.state == State.DELETING
        trouble: ProvisioningError = ProviderError("it is still there")
        try:
            await self._destroy(pod_id)
        except ProvisioningError as error:
            trouble = error
        try:
            if await self.find(pod_id) is not None:
                return trouble
        except ProvisioningError as error:
            return error
        if self.clock() < self._settled_at(row):
            return ProviderError(f"it is so new that {self.provider.name} may not know it yet")
        return None

    async def end_overdue(self, by: float) -> Failures:
        """Request the deletion of pods whose rental end was before `by`. Needs no lock: the ledger stays as it is."""
        rows = [row for row in self.rows if row.provider_id and row.ends_at is not None and row.ends_at < by]
        return await each(rows, lambda row: self._destroy(row.provider_id or ""))

    async def _destroy(self, pod_id: str) -> None:
        await repeated(lambda: self.provider.destroy(pod_id), tell=self.tell)

    def _dated(self, row: Row) -> Row:
        """Move an order time in the future to now, and the rental end with it: both are from a clock that was ahead."""
        if row.asked_at <= self.clock():
            return row
        ahead_s = row.asked_at - self.clock()
        ends_at = None if row.ends_at is None else row.ends_at - ahead_s
        return self.ledger.advance(row, row.state, asked_at=self.clock(), ends_at=ends_at)

    def _settled_at(self, row: Row) -> float:
        return row.asked_at + self.provider.settle_s

    def _forget(self, row: Row) -> None:
        self.ledger.forget(row, now=self.clock())

    async def record_strays(self) -> Observation:
        """Observe the provider, and add a row for each stray, so that it is given back. Raises ProviderError."""
        observation = await self.observe(self.rows)
        # Read the rows again: pods that were ordered meanwhile have rows now.
        for pod in observation.strays(self.rows, self.ledger.owner):
            row = self.ledger.found(pod, self.provider.name, now=self.clock())
            self.say(row.name, f"{pod.id} has our label but is not in the state file: it is to be given back")
        return observation

    async def settle(self) -> Failures:
        """Make the ledger and the provider agree, also after a crash at any point. Raises ProvisioningError.

        Looks for the pods of orders in doubt, gives back strays and pods after their rental end, and marks the rows of
        pods that do not exist as gone. Returns the errors by pod or machine.
        """
        # Several tasks that give back pods may call this at once; later calls then find little to do.
        async with self._settling:
            return await self._settle()

    async def _settle(self) -> Failures:
        provider, clock = self.provider, self.clock
        deadline = clock() + provider.settle_s + self.patience.destroy_s
        for row in self.rows:
            self._dated(row)
        while True:
            observation = await self.record_strays()
            rows = self.rows
            failures: Failures = {machine: ProviderError(why) for machine, why in observation.silent.items()}
            for row in rows:
                if why := observation.unknown.get(row.provider_id or ""):
                    failures[row.name] = ProviderError(
                        f"it is not known whether it is still there, so it may cost money: {why}"
                    )
            actions = decide(rows, observation, provider, now=clock())
            failures |= await each(actions, self._carry_out, name=lambda action: action.row.name)
            orders = [
                row
                for row in self.rows
                if row.is_in_doubt
                and not (row.state == State.CREATING and provider.repeatable)
                and decidable_at(row, provider, clock()) <= deadline
            ]
            if not orders or observation.silent or clock() > deadline:
                return failures
            self.say(orders[0].name, "looking for the pod of an order whose answer was lost")
            await asyncio.sleep(self.patience.poll_s)

    async def _carry_out(self, action: Action) -> None:
        row, pod = action.row, action.pod
        if self.ledger.current(row) != row:
            # It has changed since the observation: the next one decides about it.
            return
        if action.do == Do.ADOPT and pod is not None:
            if row.state == State.PLANNED:
                row = self.ledger.advance(row, State.CREATING)
            self.say(row.name, f"the order was carried out: its pod is {pod.id}")
            # NoCapacity: the pod differs from the order, and was given back.
            with contextlib.suppress(NoCapacity):
                await self._read_back(row, pod)
        elif action.do == Do.GIVE_UP:
            self.say(row.name, "its order is given up; if its pod appears later, it is given back")
            self.ledger.advance(row, State.DELETING)
        elif action.do == Do.COUNT_ABSENCE:
            self.ledger.count_absence(row, now=self.clock())
        elif action.do == Do.FORGET:
            self.say(row.name, action.reason)
            self._forget(row)
        elif action.do == Do.DESTROY and pod is not None:
            self.say(row.name, f"given back: {action.reason}")
            # The rental is over, even if the results cannot be fetched.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_FETCH_S):
                    await self.fetch_results(row, discard_results=True)
            await self._end(self._identified(row, pod))


def _ends_at(pod: Pod | None, ends_at: float) -> bool:
    return pod is not None and pod.ends_at is not None and abs(pod.ends_at - ends_at) <= _END_SLACK_S


def _wrong(row: Row, pod: Pod, price: float) -> str:
    """How the pod differs from the order, in words; empty: it does not."""
    if row.spec.gpu_count is not None and pod.gpu_count not in (None, row.offer.gpu_count):
        return f"{pod.gpu_count} GPUs in place of {row.offer.gpu_count}"
    limit = row.spec.max_price if row.spec.max_price is not None else row.offer.price_per_hour
    if price > limit * _PRICE_SLACK:
        return f"for {price:.2f} $/h in place of {row.offer.price_per_hour:.2f}"
    return ""
