"""The flags of `diloco status` and `diloco dashboard`: which swarm to look at."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from diloco.errors import UserError
from diloco.options.flags import HvConfig, Name, Seconds, address_list

if TYPE_CHECKING:
    from peers.admission.secrets import SwarmSecret
    from peers.monitor.observer import Observer


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A swarm that is looked at from outside."""

    initial_peers: Annotated[tuple[str, ...], address_list(of_peers=True)] = ()
    """Addresses (/ip4/…/tcp/…/p2p/…) of any members of the swarm's DHT."""
    run_id: Name = HvConfig.run_id
    """Name of the run."""
    timeout: Seconds = 20.0
    """Seconds to wait for the swarm's first answer."""
    swarm_secret_file: str | None = None
    """File with the swarm secret, or the secret itself in DILOCO_SWARM_SECRET: then only admitted peers are shown.
    Peers of a closed swarm give details only to those who have it."""

    def secret(self) -> SwarmSecret | None:
        """The swarm's secret, if one is given. Raises UserError, also if no swarm is named."""
        from peers.admission.secrets import load_secret

        if not self.initial_peers:
            raise UserError("--initial-peers is missing: the address that `diloco dht start` printed.")
        return load_secret(self.swarm_secret_file, os.environ)

    @contextlib.asynccontextmanager
    async def observed(self, secret: SwarmSecret | None) -> AsyncIterator[Observer]:
        """Join the swarm's DHT, and wait until most peers have answered. Raises PeersError and UserError."""
        from peers.monitor.observer import SETTLE_S, observing

        async with observing(
            self.run_id, self.initial_peers, timeout_s=self.timeout, secret=secret
        ) as observer:
            await observer.settled(SETTLE_S)
            yield observer
