"""Asks others for their state, and minds who announces one that it does not hand over."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from peers import membership
from peers.errors import PeerUnreachable, ProtocolError, StateUnavailable
from peers.membership import View
from peers.outer_state import OuterState
from peers.records import Announcement
from peers.round.credit import Credit

log = logging.getLogger(__name__)

Download = Callable[[list[str], str], Awaitable[OuterState]]
"""From peers of these ids, the state of this lineage. Raises StateUnavailable, PeerUnreachable or ProtocolError."""


class Donors:
    """Of one peer; `view` is that of the swarm, at any time."""

    def __init__(self, me: int, view: Callable[[], View], download: Download) -> None:
        self._me, self._view, self._download = me, view, download
        self._credit = Credit()

    def credible_view(self, lineage: str) -> View:
        """The view of a peer on this lineage without those that have not delivered."""
        return self._credit.credible(self._view(), lineage, time.monotonic())

    async def hand_over(self, target: Announcement, lineage: str) -> OuterState | None:
        """The state that `target` announces, from all who hold it, to a peer on `lineage`; None: not this time."""
        donors = membership.donors_of(self.credible_view(lineage), target.lineage, self._me)
        asked_at = time.monotonic()
        try:
            state = await self._download(donors, target.lineage)
        except (StateUnavailable, PeerUnreachable, ProtocolError) as error:
            log.info("no state from peer %d yet: %s", target.world_rank, error)
            self._credit.failed({*donors, target.peer_id}, asked_at, time.monotonic())
            return None
        self._credit.delivered(donors)
        return state
