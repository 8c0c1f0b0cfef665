"""What one provider says is there: its list, and, for every pod that the list lacks, its answer about that very id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from provisioning.errors import NoCapacity, ProvisioningError
from provisioning.ledger.row import Row
from provisioning.pods.pod import Listing, Pod
from provisioning.providers.backoff import repeated
from provisioning.providers.protocol import Provider
from provisioning.renting.reconcile import Look


class ProviderView:
    """`list_age_s`: a list that is no older than this serves everybody who asks. `tell`: as in `repeated`."""

    def __init__(
        self,
        provider: Provider,
        clock: Callable[[], float],
        list_age_s: float,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._provider, self._clock, self._list_age_s, self._tell = provider, clock, list_age_s, tell
        self._lock = asyncio.Lock()
        self._listed_at, self._listing = -1e9, Listing(pods=())

    async def listing(self, *, fresh: bool = False) -> Listing:
        """Raises ProviderError."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        async with self._lock:
            # One answer, begun after the question was asked, serves all who wait for it.
            age_s = 0.0 if fresh else self._list_age_s
            if self._listed_at < asked_at - age_s:
                began_at = loop.time()
                self._listing = await repeated(self._provider.pods, tell=self._tell)
                self._listed_at = began_at
            return self._listing

    async def find(self, pod_id: str) -> Pod | None:
        """What the provider says of this id. Raises ProviderError."""
        return await repeated(lambda: self._provider.find(pod_id), tell=self._tell)

    async def look(self, rows: Sequence[Row]) -> Look:
        """All that it says of these rows' pods, and of ours that no row knows of. Raises ProviderError."""
        listing = await self.listing(fresh=True)
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
        return Look(pods=list(pods.values()), gone=gone, unknown=unknown, silent=listing.silent)

    async def pod_of(self, row: Row, poll_s: float) -> Pod:
        """The pod of this order, waiting for it as long as it may be late. Raises NoCapacity, ProviderError."""
        deadline = self._clock() + self._provider.settle_s
        while True:
            pod = next((pod for pod in (await self.listing()).pods if row.is_pod(pod)), None)
            if pod is None and row.provider_id is not None:
                pod = await self.find(row.provider_id)
            if pod is not None:
                return pod
            if self._clock() > deadline:
                raise NoCapacity(f"{self._provider.name} has no pod {row.provider_id or row.label} any more")
            await asyncio.sleep(poll_s)
