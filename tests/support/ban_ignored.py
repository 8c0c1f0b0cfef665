"""A peer that is banned and goes on regardless, and donors that take their time."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from peers.net.channel import Channel

STALLS = "stalling"
"""In the log of one that ignores its ban, with the peer id of each that asks it for its state."""

log = logging.getLogger(__name__)


def ignore_bans() -> None:
    """From now on this process does not mind being banned. Who asks it for its state waits in vain."""
    from peers.admission.service import AdmissionService
    from peers.net.states.server import StateServer

    async def stall(server: StateServer, head: str, channel: Channel) -> None:
        asking = next(peer_id for peer_id, newest in server._newest.items() if newest is channel)
        log.info("%s %s", STALLS, asking)
        await asyncio.sleep(60.0)

    AdmissionService._is_banned = property(lambda service: False)  # type: ignore[assignment, method-assign]
    StateServer._serve_state = stall  # type: ignore[method-assign]


def hold_state_until(flag: Path) -> None:
    """From now on this process hands over its state only once there is a file of this name."""
    from peers.net.states import server

    hand_over = server._serve_snapshot

    async def hold(*arguments: Any) -> None:
        while not flag.exists():
            await asyncio.sleep(0.02)
        await hand_over(*arguments)

    server._serve_snapshot = hold
