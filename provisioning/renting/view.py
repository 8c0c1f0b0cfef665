"""What one provider says is there: its list, and, for every pod that the list lacks, its answer about that very id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from provisioning.errors import NoCapacity, ProvisioningError
from provisioning.ledger.row import Row
from provisioning.pods.pod import Pod
from provisioning.providers.backoff import repeated
from provisioning.providers.protocol import Provider
from provisioning.renting.reconcile import Look


@dataclass(frozen=True)
class ProviderView:
    """`tell`: as in `repeated`."""

    provider: Provider
    clock: Callable[[], float]
    tell: Callable[[str], None]

    async def find(self, pod_id: str) -> Pod | None:
        """What the provider says of this id. Raises ProviderError."""
        return await repeated(lambda: self.provider.find(pod_id), tell=self.tell)

    async def look(self, rows: Sequence[Row]) -> Look:
        """All that it says of these rows' pods, and of ours that no row knows of. Raises ProviderError."""
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
        return Look(pods=list(pods.values()), gone=gone, unknown=unknown, silent=listing.silent)

    async def pod_of(self, row: Row, poll_s: float) -> Pod:
        """The pod of this order, waiting for it as long as it may be late. Raises NoCapacity, ProviderError."""
        deadline = self.clock() + self.provider.settle_s
        while row.provider_id is not None:
            # By its id: lists are older.
            pod = await self.find(row.provider_id)
            if pod is not None:
                return pod
            if self.clock() > deadline:
                break
            await asyncio.sleep(poll_s)
        raise NoCapacity(f"{self.provider.name} has no pod {row.provider_id or row.label} any more")
