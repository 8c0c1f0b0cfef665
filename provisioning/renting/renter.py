"""One pod at one provider: ordered until it answers, and given back until the provider says that it does not exist.

Every order is in the ledger before it is sent. What a crash leaves half done is finished by reconcile.py.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

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
from provisioning.ledger.keys import FETCH, RESULTS, RUN_DIR
from provisioning.ledger.ledger import Ledger
from provisioning.machines.machine import Machine
from provisioning.machines.results import fetch_results
from provisioning.pods.pod import Pod, Row, State
from provisioning.providers.backoff import repeated
from provisioning.providers.cloud import Cloud
from provisioning.providers.protocol import Provider
from provisioning.renting.clock import Clock

Say = Callable[[str, str], None]
"""Prints a message to the user; arguments: the pod's name, and the text."""
# For rounded cents. A pod that costs more than the user agreed to is given back.
_PRICE_SLACK = 1.02
# An extension of the shortest allowed length, 36 s, has to be seen.
_EARLY_S, _LATE_S = 30.0, 600.0
MAX_TRANSFERS = 8
"""Transfers at once. Pods send more slowly than this machine receives, so one alone would leave its line idle; with
more, each may be too slow to end in time."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Timeouts and the polling interval, in seconds."""

    boot_s: float = 900.0
    destroy_s: float = 180.0
    poll_s: float = 2.0


@dataclass(kw_only=True)
class Renter:
    """Rents and gives back the pods of one ledger at one provider. The caller holds the ledger's lock."""

    ledger: Ledger
    provider: Provider
    say: Say
    patience: Patience = field(default_factory=Patience)
    clock: Callable[[], float] = field(default_factory=Clock)
    fetches: Sequence[str] | None = None
    """Which results to fetch before a pod is given back; None: as was chosen when the pods were rented."""
    settling: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the ledger and the provider are made to agree (reconcile.py)."""
    transfers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_TRANSFERS))
    """Held while files are copied from or to a pod: of many transfers at once, none might end in time."""
    has_other_work: bool = False
    """Whether to stop waiting for pods that boot: they go on booting, and a later call waits for them again."""

    def __post_init__(self) -> None:
        self._machines: dict[str, Machine] = {}
        self._ordering = asyncio.Lock()
        self._listing: asyncio.Task[dict[str, Pod]] | None = None
        self._next_listing_at = 0.0

    async def close(self) -> None:
        if self._listing is not None:
            self._listing.cancel()
        for machine in self._machines.values():
            await machine.close()
        self._machines.clear()
        await self.provider.close()

    def tell(self, text: str) -> None:
        """Print a message about the provider."""
        self.say(self.provider.name, text)

    @property
    def rows(self) -> list[Row]:
        return [row for row in self.ledger.rows() if row.provider == self.provider.name]

    async def until_reachable(self, row: Row) -> None:
        """Order the pod unless it is ordered, and wait until it answers. Raises NoCapacity if another offer may do."""
        if row.state in (State.PLANNED, State.CREATING):
            await self._order(row)
        current = self.ledger.current(row)
        assert current is not None, row.label
        await self._boot(current)

    async def _order(self, row: Row) -> None:
        """Send the order once; if its answer is lost, look for the pod in listings. Raises a ProviderError."""
        if row.provider_id is not None:
            # An earlier command received the answer, and died before it found the pod.
            await self.read_back(row, await self.pod_of(row))
            return
        was_sent, pod_id = row.state == State.CREATING, ""
        try:
            async with self._ordering:
                # Not before this lock is held: an order is in doubt only if it may have been sent.
                row = self.ledger.advance(row, State.CREATING, asked_at=self.clock())
                # Only Unavailable is repeated: it says that the order was not carried out.
                pod_id = await repeated(
                    lambda: self.provider.create(row), tell=self.tell, unexpected=OutcomeUnknown
                )
        except OutcomeUnknown as error:
            self.say(row.name, f"the answer to the order was lost ({error}); looking for its pod")
        except (ProviderError, UserError):
            if was_sent:
                # An earlier command sent the order, too, and lost the answer: its request may have made a pod.
                self.ledger.advance(row, State.DELETING)
            else:
                self.ledger.forget(row, now=self.clock())
            raise
        # Update `asked_at`: repeated requests take a while.
        if pod_id:
            row = self.ledger.set_pod(row, pod_id, None, State.CREATING, asked_at=self.clock())
            pod = await self.pod_of(row)
        else:
            row = self.ledger.advance(row, State.CREATING, asked_at=self.clock())
            pod = await self._appeared(row)
        await self.read_back(row, pod)

    async def _appeared(self, row: Row) -> Pod:
        """The pod of an order whose answer was lost. Raises NoCapacity if no listing shows it in time."""
        deadline = self.clock() + self.provider.settle_s + self.patience.poll_s
        while True:
            for pod in (await repeated(self.provider.pods, tell=self.tell)).pods:
                if row.is_pod(pod):
                    return pod
            if self.clock() > deadline:
                # If the pod appears later, it is given back.
                self.ledger.advance(row, State.DELETING)
                raise NoCapacity("the answer to the order was lost, and no listing shows its pod")
            await asyncio.sleep(self.patience.poll_s)

    async def _boot(self, row: Row) -> None:
        """Wait until the pod answers with its host key. Raises NoCapacity if a new pod fails or is not up in time."""
        deadline = self.clock() + self.patience.boot_s
        if row.state == State.BOOTING:
            # Its time does not begin anew with each call, but one call may look more than once.
            deadline = max(row.asked_at + self.patience.boot_s, self.clock() + self.provider.settle_s)
        why = "it did not come up"
        while True:
            pod = await self._listed(row) or await self.pod_of(row)
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
            if self.has_other_work:
                raise MachineError(f"{pod.id} still boots")
            await asyncio.sleep(self.patience.poll_s)

    async def _listed(self, row: Row) -> Pod | None:
        """The pod of this row in a listing that all booting pods share; None: ask for it by id. Raises ProviderError.

        Clouds limit the rate of requests, and one for each pod might be too many. Own machines do not, and one that
        does not answer would delay each listing.
        """
        if not isinstance(self.provider, Cloud):
            return None
        now = asyncio.get_running_loop().time()
        if self._listing is None or (self._listing.done() and now >= self._next_listing_at):
            self._next_listing_at = now + self.patience.poll_s
            self._listing = asyncio.create_task(self._pods_by_id())
        return (await asyncio.shield(self._listing)).get(row.provider_id or "")

    async def _pods_by_id(self) -> dict[str, Pod]:
        return {pod.id: pod for pod in (await repeated(self.provider.pods, tell=self.tell)).pods}

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

    async def read_back(self, row: Row, pod: Pod) -> None:
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
        await self.schedule_end(row, pod)
        # A command may have extended the rental, and scheduled that end, before this one was scheduled.
        while (current := self.ledger.current(row)) is not None and current.ends_at != row.ends_at:
            row = current
            await self.schedule_end(row, await self.pod_of(row))

    async def schedule_end(self, row: Row, pod: Pod) -> None:
        """Set the rental end of this row's pod if its provider supports that. Tells the user if it is not confirmed."""
        if row.ends_at is None or not self.provider.keeps_time:
            return
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

    async def find(self, pod_id: str) -> Pod | None:
        """The pod with this id; None: the provider says that it does not exist. Raises ProviderError."""
        return await repeated(lambda: self.provider.find(pod_id), tell=self.tell)

    async def pod_of(self, row: Row) -> Pod:
        """The pod of this row. Waits up to `settle_s` for it, then raises NoCapacity. Raises ProviderError."""
        deadline = self.clock() + self.provider.settle_s
        while row.provider_id is not None:
            # By id, since listings lag behind.
            pod = await self.find(row.provider_id)
            if pod is not None:
                return pod
            if self.clock() > deadline:
                break
            await asyncio.sleep(self.patience.poll_s)
        raise NoCapacity(f"{self.provider.name} has no pod {row.provider_id or row.label} any more")

    async def machine(self, row: Row) -> Machine:
        """The machine of this row's pod.

        Raises MachineError if the pod is not up, NoCapacity if it does not exist, HostKeyChanged or UserError.
        """
        return self._machines.get(row.label) or await self.machine_of(row, await self.pod_of(row))

    async def reached(self, row: Row) -> tuple[Machine, Pod]:
        """The machine and the pod of this row. Raises the same errors as `machine`."""
        pod = await self.pod_of(row)
        return await self.machine_of(row, pod), pod

    async def machine_of(self, row: Row, pod: Pod) -> Machine:
        """The machine of `pod`, which is this row's."""
        if row.label not in self._machines:
            if pod.failure:
                raise MachineError(f"{row.name} has died: {pod.failure}")
            is_new = row.state in (State.CREATING, State.BOOTING)
            # Before its host key is pinned, nothing connects to it but _contact.
            if is_new or not pod.is_ready:
                raise MachineError(f"{row.name} is not up {'yet' if is_new else 'any more'}")
            self._machines[row.label] = await self.provider.machine(pod, row.host_key)
        return self._machines[row.label]

    async def give_back(self, row: Row, *, discard_results: bool = False, fetched: bool = False) -> bool:
        """Fetch the results unless `fetched`, delete the pod, and wait until its provider says that it is gone.

        False: it is not known whether this order made a pod, so its row stays; reconcile.py looks for the pod. May be
        repeated, also by several tasks at once. Raises ResultsNotFetched, in which case the pod is kept, or
        ProviderError, which says what the user should do.
        """
        current = self.ledger.current(row)
        if current is None:
            return True
        if current.state == State.PLANNED:
            self.ledger.forget(current, now=self.clock())
            return True
        if not fetched:
            await self.fetch_results(current, discard_results=discard_results)
        # Another task may have given it back meanwhile.
        current = self.ledger.current(row)
        if current is None:
            return True
        try:
            row = self.ledger.advance(self.dated(current), State.DELETING)
        except UserError:
            # Delete the pod even if the disk is full. The ledger is updated later.
            if current.provider_id is not None:
                await self.destroy(current.provider_id)
            raise
        if row.provider_id is None:
            return False
        await self.end(row)
        return True

    async def fetch_results(
        self, row: Row, *, discard_results: bool = False, limit_s: float | None = None
    ) -> None:
        """Fetch the results of a pod. Raises ResultsNotFetched if that fails.

        Only prints the failure if `discard_results`, or if the pod is gone or has failed for good. `limit_s`: for each
        transfer, from its beginning; TimeoutError is raised after it.
        """
        words = self.fetches if self.fetches is not None else self.ledger.recall(FETCH).split()
        if row.state not in (State.SYNCED, State.RUNNING) or not self.ledger.recall(RUN_DIR) or not words:
            return
        into, failure = self._results_directory(row), ""
        try:
            pod = await self.pod_of(row)
            failure = pod.failure
            machine = await self.machine_of(row, replace(pod, is_ready=True, failure=""))
            fetched = await fetch_results(machine, row.label, words, into, self.transfers, limit_s)
        except NoCapacity:
            self.say(row.name, "there is no such pod any more, so its results cannot be fetched")
        except ProvisioningError as error:
            text = f"its results could not be fetched: {error}"
            self.say(row.name, text)
            if not failure and not discard_results:
                raise ResultsNotFetched(
                    f"{text}. The pod still exists, for {row.offer.price_per_hour:.2f} $/h; `diloco pods down --yes "
                    f"{row.name}` gives it back without them."
                ) from error
        else:
            self.say(row.name, fetched)

    def _results_directory(self, row: Row) -> str:
        """The directory of this pod's results, with a suffix if an earlier pod of the same name has used it."""
        into = f"{self.ledger.recall(RUN_DIR).rstrip('/')}/{row.name}"
        key = f"{RESULTS}{into}"
        if self.ledger.recall(key) not in ("", row.label):
            return f"{into}-{row.label.rpartition('-')[2]}"
        self.ledger.remember(key, row.label)
        return into

    async def end(self, row: Row) -> None:
        """Request the deletion by id, until the provider says that the pod does not exist. Listings do not count."""
        settled_at = row.asked_at + self.provider.settle_s
        deadline = max(self.clock() + self.patience.destroy_s, settled_at + 2 * self.patience.poll_s)
        said = ""
        while (trouble := await self._deleted(row, settled_at)) is not None:
            if isinstance(trouble, UserError) or self.clock() > deadline:
                raise ProviderError(
                    f"POD {row.name} ({row.provider_id}) OF {self.provider.name.upper()} IS NOT KNOWN TO BE GONE AND "
                    f"MAY COST MONEY: {trouble}. `diloco pods down` tries again; or end it on the provider's web site."
                )
            if str(trouble) != said:
                said = str(trouble)
                self.say(row.name, f"not given back yet: {said}")
            await asyncio.sleep(self.patience.poll_s)
        self.ledger.forget(row, now=self.clock())
        self.say(row.name, "given back")

    async def _deleted(self, row: Row, settled_at: float) -> ProvisioningError | None:
        """Request the deletion once, and check the result. None: the pod is gone; else why it may not be."""
        pod_id = row.provider_id
        assert pod_id is not None and row.state == State.DELETING
        trouble: ProvisioningError = ProviderError("it is still there")
        try:
            await self.destroy(pod_id)
        except ProvisioningError as error:
            trouble = error
        try:
            if await self.find(pod_id) is not None:
                return trouble
        except ProvisioningError as error:
            return error
        if self.clock() < settled_at:
            return ProviderError(f"it is so new that {self.provider.name} may not know it yet")
        return None

    async def destroy(self, pod_id: str) -> None:
        """Request the deletion of this id. The ledger stays as it is. Raises ProviderError."""
        await repeated(lambda: self.provider.destroy(pod_id), tell=self.tell)

    def dated(self, row: Row) -> Row:
        """Move an order time that is in the future to now, and the rental end with it: the clock was ahead before."""
        if row.asked_at <= self.clock():
            return row
        ahead_s = row.asked_at - self.clock()
        ends_at = None if row.ends_at is None else row.ends_at - ahead_s
        return self.ledger.advance(row, row.state, asked_at=self.clock(), ends_at=ends_at)


def _ends_at(pod: Pod | None, ends_at: float) -> bool:
    return pod is not None and pod.ends_at is not None and -_EARLY_S <= pod.ends_at - ends_at <= _LATE_S


def _wrong(row: Row, pod: Pod, price: float) -> str:
    """How the pod differs from the order, in words; empty: it does not."""
    if row.spec.gpu_count is not None and pod.gpu_count not in (None, row.offer.gpu_count):
        return f"{pod.gpu_count} GPUs in place of {row.offer.gpu_count}"
    limit = row.spec.max_price if row.spec.max_price is not None else row.offer.price_per_hour
    if price > limit * _PRICE_SLACK:
        return f"for {price:.2f} $/h in place of {row.offer.price_per_hour:.2f}"
    return ""
