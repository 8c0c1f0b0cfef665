"""From a plan to pods that answer, and back to none: every request is in the ledger before it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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
from provisioning.ledger import Ledger, Row
from provisioning.machines import Machine
from provisioning.plan import Plan
from provisioning.pods import Offer, Pod, PodSpec
from provisioning.providers.protocol import Provider
from provisioning.reconcile import Adopt, Destroy, Forget, Reorder, Wait, decide
from provisioning.states import State

T = TypeVar("T")
Say = Callable[[str, str], None]
"""Tells people about a pod: its name, and what happens."""

_MAX_OFFERS = 4
_PRICE_SLACK = 1.02
# Without a price limit, the next offer may cost so many times what was confirmed.
_DEARER = 1.5


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long things may take, in seconds."""

    boot_s: float = 900.0
    destroy_s: float = 180.0
    poll_s: float = 2.0
    list_age_s: float = 0.5
    """A list that is no older than this serves everybody who asks."""


@dataclass
class Renter:
    """Rents and gives back the pods of one ledger at one provider. The caller holds the ledger's lock."""

    ledger: Ledger
    provider: Provider
    public_key: str
    say: Say
    patience: Patience = field(default_factory=Patience)
    clock: Callable[[], float] = time.time
    on_state: Callable[[str, State], None] = lambda name, state: None
    on_planned: Callable[[], None] = lambda: None
    """All that is to be ordered is written down, and nothing has been ordered yet."""

    def __post_init__(self) -> None:
        self._taken: Counter[str] = Counter()
        self._has_unclear = False
        self._list_lock, self._settling = asyncio.Lock(), asyncio.Lock()
        self._listed: tuple[float, list[Pod]] = (-1e9, [])
        self._machines: dict[str, Machine] = {}

    @property
    def rows(self) -> list[Row]:
        return [row for row in self.ledger.rows() if row.provider == self.provider.name]

    async def close(self) -> None:
        for machine in self._machines.values():
            await machine.close()
        self._machines.clear()

    async def settle(self) -> None:
        """Make the ledger and the provider agree; also after a crash at any point. Raises ProvisioningError.

        Orders that nobody knows the outcome of are looked for until it is certain; orphans and pods whose time is
        over are given back; pods that vanished are forgotten.
        """
        # Several pods that are given back may all come here: what one settles, the next finds settled.
        async with self._settling:
            await self._settle()

    async def _settle(self) -> None:
        deadline = self.clock() + self.provider.settle_s + self.patience.destroy_s
        while True:
            listed = await self.listed(fresh=True)
            actions = decide(
                self.rows,
                listed,
                owner=self.ledger.owner,
                now=self.clock(),
                settle_s=self.provider.settle_s,
                repeatable=self.provider.repeatable,
            )
            waits = [action for action in actions if isinstance(action, Wait)]
            orders = [action for action in waits if action.row.state in (State.CREATING, State.DELETING)]
            await gathered(self._carry_out(action) for action in actions if not isinstance(action, Wait))
            if not orders:
                return
            if self.clock() > deadline:
                raise ProviderError(f"it stays unknown what became of {orders[0].row.name}; try again later")
            self.say(orders[0].row.name, "looking whether an order got through whose answer was lost")
            await asyncio.sleep(self.patience.poll_s)

    async def _carry_out(self, action: Adopt | Reorder | Forget | Destroy) -> None:
        match action:
            case Adopt(row, pod):
                if row.state == State.PLANNED:
                    self.ledger.advance(row.name, State.CREATING)
                self.say(row.name, f"the order had got through: it is {pod.id}")
                # What is not as ordered has been given back, and said so.
                with contextlib.suppress(NoCapacity):
                    await self._rented(row, pod)
            case Reorder(row):
                if not self.provider.repeatable:
                    self._advance(row.name, State.PLANNED)
            case Forget(row, reason):
                self.say(row.name, reason)
                self.ledger.forget(row.name, now=self.clock())
                self.on_state(row.name, State.GONE)
            case Destroy(pod, row, reason):
                self.say(row.name if row else pod.label, f"given back: {reason}")
                if row:
                    await self._give_back(row, [pod])
                else:
                    await self._destroy_until_gone(pod.id, pod.label)

    async def give_back(self, row: Row) -> None:
        """Until the provider no longer lists it; then the row goes. May be repeated, also while it is under way.

        Raises ProviderError with what is to be done.
        """
        if self.ledger.row(row.name) is None:
            return
        if row.state == State.PLANNED:
            self.ledger.forget(row.name, now=self.clock())
            return
        row = self._advance(row.name, State.DELETING)
        found = [pod for pod in await self.listed(fresh=True) if row.is_pod(pod)]
        if not found and row.provider_id is None and self.clock() < row.asked_at + self.provider.settle_s:
            await self.settle()
            return
        await self._give_back(row, found)

    async def _give_back(self, row: Row, found: Sequence[Pod]) -> None:
        """The pods that were found of this row, and the row."""
        if self.ledger.row(row.name) is None:
            return
        self._advance(row.name, State.DELETING)
        for pod in found:
            if row.provider_id is None:
                self.ledger.bill(row, pod.price_per_hour or row.offer.price_per_hour)
            await self._destroy_until_gone(pod.id, row.name)
        self.ledger.forget(row.name, now=self.clock())
        self.on_state(row.name, State.GONE)
        self.say(row.name, "given back")

    async def _destroy_until_gone(self, pod_id: str, name: str) -> None:
        deadline = self.clock() + self.patience.destroy_s
        why = "it is still listed"
        while True:
            try:
                await repeated(lambda: self.provider.destroy(pod_id))
                if all(pod.id != pod_id for pod in await self.listed(fresh=True)):
                    return
            except ProvisioningError as error:
                why = str(error)
                self.say(name, f"could not be given back yet ({why}); trying again")
            if self.clock() > deadline:
                raise ProviderError(
                    f"POD {name} ({pod_id}) OF {self.provider.name.upper()} IS STILL THERE AND MAY COST MONEY: {why}. "
                    "`diloco pods down` tries again; or end it on the provider's web site."
                )
            await asyncio.sleep(self.patience.poll_s)

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
            await self.settle()
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
            if current and current.state not in (State.PLANNED, State.CREATING):
                await self.give_back(current)
            elif current and current.state == State.CREATING:
                self._advance(spec.name, State.PLANNED, trouble=reason)
            limit = spec.max_price if spec.max_price is not None else confirmed * _DEARER
            left = [
                offer
                for offer in candidates(spec, offers, without=tried)
                if offer.price_per_hour <= limit and self._taken[offer.id] < offer.num_available
            ]
            if not left:
                if self.ledger.row(spec.name):
                    self.ledger.forget(spec.name, now=self.clock())
                raise NoCapacity(f"{reason}; no other offer fits")
            self.say(
                spec.name, f"{reason}; the next offer is {left[0].id} for {left[0].price_per_hour:.2f} $/h"
            )
            self._taken[left[0].id] += 1
            self._plan(spec, left[0])
        raise NoCapacity(f"{_MAX_OFFERS} offers in turn came to nothing, the last one because {reason}")

    async def _rent(self, row: Row) -> None:
        """Send the order, once; where the answer is lost, look for the pod. Raises NoCapacity, ProviderError."""
        row = self._advance(row.name, State.CREATING, asked_at=self.clock())
        try:
            # Unavailable means that it was not carried out, and is asked again; nothing else ever is.
            order = row.order(self.public_key)
            await repeated(lambda: self.provider.create(order))
        except NoCapacity:
            raise
        except OutcomeUnknown as error:
            self._has_unclear = True
            self.say(row.name, f"no clear answer to the order ({error}); looking whether it got through")
        except (ProviderError, UserError):
            # A clear no: nothing was rented.
            self._advance(row.name, State.PLANNED)
            self.ledger.forget(row.name, now=self.clock())
            raise
        pod = await self._appeared(row)
        if pod is None:
            raise NoCapacity("the order did not get through")
        await self._rented(row, pod)

    async def _appeared(self, row: Row) -> Pod | None:
        deadline = self.clock() + self.provider.settle_s + self.patience.poll_s
        while True:
            for pod in await self.listed(fresh=True):
                if row.is_pod(pod):
                    return pod
            if self.clock() > deadline:
                return None
            await asyncio.sleep(self.patience.poll_s)

    async def _rented(self, row: Row, pod: Pod) -> None:
        """Read back what was rented. What was not asked for is given back at once, and said aloud."""
        price = pod.price_per_hour if pod.price_per_hour is not None else row.offer.price_per_hour
        self.ledger.rented(row.name, pod.id, price)
        self.on_state(row.name, State.BOOTING)
        wrong = _wrong(row, pod, price)
        if wrong:
            self.say(row.name, f"{self.provider.name} rented {wrong}; giving it back")
            await self.give_back(self._row(row.name))
            raise NoCapacity(f"{self.provider.name} rented {wrong}, and it was given back")
        await self.hold_to_end(row)

    async def hold_to_end(self, row: Row) -> None:
        """See to it that the provider takes the pod back in time, where it can; read back, and say it if not."""
        if row.ends_at is None or not self.provider.keeps_time:
            return
        for _ in range(2):
            pod = await self._pod_of(row)
            if pod.ends_at is not None and abs(pod.ends_at - row.ends_at) <= 600:
                return
            await repeated(functools.partial(self.provider.set_end, pod.id, row.ends_at))
        self.say(row.name, f"{self.provider.name} does not confirm when it ends; we watch the time ourselves")

    async def _boot(self, row: Row) -> None:
        """Until it answers under its host key; NoCapacity where this pod will not."""
        deadline = self.clock() + self.patience.boot_s
        why = "it did not come up"
        while True:
            pod = await self._pod_of(row)
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
            self.ledger.advance(row.name, row.state, host_key=key)
        machine = await self.provider.machine(pod, key)
        (await machine.run("true")).checked("the first command")
        self._machines[row.name] = machine
        if row.state == State.BOOTING:
            self._advance(row.name, State.REACHABLE)

    async def machine(self, name: str) -> Machine:
        """The machine of a pod that has answered before. Raises MachineError, HostKeyChanged, UserError."""
        if name not in self._machines:
            row = self._row(name)
            pod = await self._pod_of(row)
            if not pod.is_ready:
                raise MachineError(f"{name} is not up yet")
            self._machines[name] = await self.provider.machine(pod, row.host_key)
        return self._machines[name]

    async def pod(self, name: str) -> Pod:
        return await self._pod_of(self._row(name))

    async def listed(self, *, fresh: bool = False) -> list[Pod]:
        asked_at = time.monotonic()
        async with self._list_lock:
            # One answer, begun after the question was asked, serves all who wait for it.
            age_s = 0.0 if fresh else self.patience.list_age_s
            if self._listed[0] < asked_at - age_s:
                began_at = time.monotonic()
                self._listed = (began_at, await repeated(self.provider.pods))
            return self._listed[1]

    async def _pod_of(self, row: Row) -> Pod:
        deadline = self.clock() + self.provider.settle_s
        while True:
            for pod in await self.listed():
                if row.is_pod(pod):
                    return pod
            if self.clock() > deadline:
                raise NoCapacity(
                    f"{row.provider_id or row.label} vanished: {self.provider.name} no longer lists it"
                )
            await asyncio.sleep(self.patience.poll_s)

    def _row(self, name: str) -> Row:
        row = self.ledger.row(name)
        if row is None:
            raise UserError(f"There is no pod {name}; `diloco pods status` lists them.")
        return row

    def _advance(self, name: str, state: State, **changes: object) -> Row:
        row = self.ledger.advance(name, state, **changes)
        self.on_state(name, state)
        return row


def _wrong(row: Row, pod: Pod, price: float) -> str:
    """What is not as ordered, in words."""
    if row.spec.gpu_count is not None and pod.gpu_count not in (None, row.offer.gpu_count):
        return f"{pod.gpu_count} GPUs in place of {row.offer.gpu_count}"
    limit = row.spec.max_price if row.spec.max_price is not None else row.offer.price_per_hour * _DEARER
    if price > limit * _PRICE_SLACK:
        return f"for {price:.2f} $/h in place of {row.offer.price_per_hour:.2f}"
    return ""


async def gathered(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results; if one fails, the others are finished first."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
