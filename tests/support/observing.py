"""A single look at a swarm from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers.admission.secrets import SwarmSecret
from peers.monitor.observer import SETTLE_S, observing


async def read_swarm(
    run_id: str, initial_peers: Sequence[str], *, timeout_s: float, secret: SwarmSecret | None = None
) -> dict[str, Any]:
    """The present swarm as `summary_of` describes it; with the swarm secret, only peers that were admitted.

    Raises UserError when nobody answers in time.
    """
    async with observing(run_id, initial_peers, timeout_s=timeout_s, secret=secret) as observer:
        await observer.settled(SETTLE_S)
        return observer.swarm()
