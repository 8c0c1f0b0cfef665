"""A ledger's pods at one provider: their state there, their machines, and their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from provisioning.errors import MachineError, NoCapacity, ProvisioningError, ResultsNotFetched
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row, State
from provisioning.machines.machine import Machine
from provisioning.machines.results import fetch_results
from provisioning.pods.pod import Pod
from provisioning.providers.backoff import repeated
from provisioning.providers.protocol import Provider
from provisioning.renting.clock import Clock
from provisioning.renting.reconcile import Observation

RUN_DIR, FETCH = "run_dir", "fetch"
"""Keys in the ledger: the directory or URL of results, and which results are fetched."""
Say = Callable[[str, str], None]
"""Prints a message to the user; arguments: the pod's name, and the text."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Timeouts and the polling interval, in seconds."""

    boot_s: float = 900.0
    destroy_s: float = 180.0
    poll_s: float = 2.0


@dataclass(kw_only=True)
class Account:
    """Queries the provider. Orders and deletions are left to its subclass, Renter."""

    ledger: Ledger
    provider: Provider
    say: Say
    patience: Patience = field(default_factory=Patience)
    clock: Callable[[], float] = field(default_factory=Clock)
    fetches: Sequence[str] | None = None
    """Which results to fetch before a pod is given back; None: as was chosen when the pods were rented."""

    def __post_init__(self) -> None:
        self._machines: dict[str, Machine] = {}

    async def close(self) -> None:
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

    async def find(self, pod_id: str) -> Pod | None:
        """The pod with this id; None: the provider says that it does not exist. Raises ProviderError."""
        return await repeated(lambda: self.provider.find(pod_id), tell=self.tell)

    async def observe(self, rows: Sequence[Row]) -> Observation:
        """List the provider's pods, and look up each pod of `rows` that is missing there. Raises ProviderError."""
        listing = await repeated(self.provider.pods, tell=self.tell)
        pods = {pod.id: pod for pod in listing.pods}
        unlisted = [row.provider_id for row in rows if row.provider_id and row.provider_id not in pods]
        gone: set[str] = set()
        unknown: dict[str, str] = {}

        async def ask(pod_id: str) -> None:
            try:
                pod = await self.find(pod_id)
            except ProvisioningError as error:
                unknown[pod_id] = str(error)
                return
            if pod is None:
                gone.add(pod_id)
            else:
                pods[pod.id] = pod

        await asyncio.gather(*(ask(pod_id) for pod_id in unlisted))
        return Observation(pods=list(pods.values()), gone=gone, unknown=unknown, silent=listing.silent)

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
            if not pod.is_ready:
                is_new = row.state in (State.CREATING, State.BOOTING)
                raise MachineError(f"{row.name} is not up {'yet' if is_new else 'any more'}")
            self._machines[row.label] = await self.provider.machine(pod, row.host_key)
        return self._machines[row.label]

    async def fetch_results(self, row: Row, *, discard_results: bool = False) -> None:
        """Fetch the results of a pod. Raises ResultsNotFetched if that fails.

        It only prints the failure if `discard_results`, or if the pod is gone or has failed for good.
        """
        words = self.fetches if self.fetches is not None else self.ledger.recall(FETCH).split()
        if row.state not in (State.SYNCED, State.RUNNING) or not self.ledger.recall(RUN_DIR) or not words:
            return
        into, failure = self._results_directory(row), ""
        try:
            pod = await self.pod_of(row)
            failure = pod.failure
            machine = await self.machine_of(row, replace(pod, is_ready=True, failure=""))
            fetched = await fetch_results(machine, row.label, words, into)
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
            self.say(row.name, fetched.in_words(into))

    def _results_directory(self, row: Row) -> str:
        """The directory of this pod's results, with a suffix if an earlier pod of the same name has used it."""
        into = f"{self.ledger.recall(RUN_DIR).rstrip('/')}/{row.name}"
        key = f"results:{into}"
        if self.ledger.recall(key) not in ("", row.label):
            return f"{into}-{row.label.rpartition('-')[2]}"
        self.ledger.remember(key, row.label)
        return into
