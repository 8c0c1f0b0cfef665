"""One provider and a ledger's pods there: what it says of them, their machines, and fetching their results."""

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
"""What the ledger remembers: where results go, and which."""
Say = Callable[[str, str], None]
"""Tells people about a pod: its name, and what happens."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long things may take, in seconds."""

    boot_s: float = 900.0
    destroy_s: float = 180.0
    poll_s: float = 2.0


@dataclass(kw_only=True)
class Account:
    """Asks, and changes nothing that costs money: a Renter does."""

    ledger: Ledger
    provider: Provider
    say: Say
    patience: Patience = field(default_factory=Patience)
    clock: Callable[[], float] = field(default_factory=Clock)
    fetches: Sequence[str] | None = None
    """What is brought home of a pod before it is given back; None: what was said when it was rented."""

    def __post_init__(self) -> None:
        self._machines: dict[str, Machine] = {}

    async def close(self) -> None:
        for machine in self._machines.values():
            await machine.close()
        self._machines.clear()
        await self.provider.close()

    def tell(self, text: str) -> None:
        """Tell people about the provider itself."""
        self.say(self.provider.name, text)

    @property
    def rows(self) -> list[Row]:
        return [row for row in self.ledger.rows() if row.provider == self.provider.name]

    async def find(self, pod_id: str) -> Pod | None:
        """What the provider says of this id. Raises ProviderError."""
        return await repeated(lambda: self.provider.find(pod_id), tell=self.tell)

    async def observe(self, rows: Sequence[Row]) -> Observation:
        """What the provider lists, and what it says of the very id of every pod of these rows that its list lacks.

        Raises ProviderError.
        """
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
        """The pod of this order, waiting for it as long as it may be late. Raises NoCapacity, ProviderError."""
        deadline = self.clock() + self.provider.settle_s
        while row.provider_id is not None:
            # By its id: lists are older.
            pod = await self.find(row.provider_id)
            if pod is not None:
                return pod
            if self.clock() > deadline:
                break
            await asyncio.sleep(self.patience.poll_s)
        raise NoCapacity(f"{self.provider.name} has no pod {row.provider_id or row.label} any more")

    async def machine(self, row: Row) -> Machine:
        """The machine of a pod that has answered before. Raises MachineError, HostKeyChanged, UserError."""
        return self._machines.get(row.label) or await self.machine_of(row, await self.pod_of(row))

    async def reached(self, row: Row) -> tuple[Machine, Pod]:
        """Its machine, and where that is. Raises as the two do."""
        pod = await self.pod_of(row)
        return await self.machine_of(row, pod), pod

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

    async def fetch_results(self, row: Row, *, discard_results: bool = False) -> None:
        """Fetch what was made on a pod. What cannot be is said, and raises ResultsNotFetched unless it may be lost."""
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
                    f"{text}. It is there still, for {row.offer.price_per_hour:.2f} $/h; `diloco pods down --yes "
                    f"{row.name}` gives it back without them."
                ) from error
        else:
            self.say(row.name, fetched.in_words(into))

    def _results_directory(self, row: Row) -> str:
        """Where a pod's results go: this very pod's alone, where another one of its name had some."""
        into = f"{self.ledger.recall(RUN_DIR).rstrip('/')}/{row.name}"
        key = f"results:{into}"
        if self.ledger.recall(key) not in ("", row.label):
            return f"{into}-{row.label.rpartition('-')[2]}"
        self.ledger.remember(key, row.label)
        return into
