"""A live peer in the coordinator's place, so that a run whose coordinator has died can still grow.

The lowest live world rank does it, while no coordinator answers. It knows the ranks of all peers that it has met, those
that are away included, and gives newcomers ranks of a range kept for that (peers/ledger.py). A coordinator that comes
back finds them in the DHT, and takes over again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable

from peers.admission_service import AdmissionService
from peers.dht import Dht
from peers.identity import Identity
from peers.ledger import Ledger, of_stand_in
from peers.membership import View
from peers.rank_request import HOLDER_TIMEOUT_S, coordinators, protocol_of
from peers.registrar import ANNOUNCE_INTERVAL_S, Registrar, announce

log = logging.getLogger(__name__)


class StandIn:
    """Used from one event loop. `view` holds every live peer, this one included."""

    def __init__(
        self,
        *,
        run_id: str,
        world_rank: int,
        identity: Identity,
        dht: Dht,
        admission: AdmissionService,
        view: Callable[[], View],
    ) -> None:
        self._run_id, self._world_rank, self._identity = run_id, world_rank, identity
        self._dht, self._admission, self._view = dht, admission, view
        self._ledger: Ledger | None = None
        self._is_on_duty = False

    def view_changed(self) -> None:
        """Remember who is there: whoever comes back without a number gets the one it had."""
        if self._ledger is None:
            return
        try:
            for rank, peer in self._view().items():
                holder = self._ledger.holder(rank)
                if holder != peer.peer_id:
                    self._ledger.assign(peer.peer_id, rank, evict=holder)
        except sqlite3.Error as error:
            # A full disk costs this memory, and not the training.
            log.warning("cannot note who holds which world rank: %s", error)

    async def run(self) -> None:
        """Until cancelled. Raises UserError where the ledger cannot be kept."""
        path = self._identity.path.with_suffix(".ranks.sqlite")
        with contextlib.ExitStack() as stack:
            ledger = stack.enter_context(
                contextlib.closing(Ledger(path, lambda: of_stand_in(self._world_rank)))
            )
            stack.callback(self._forget_ledger)
            registrar = Registrar(
                self._run_id, ledger, self._dht, self._admission.gate, is_on_duty=lambda: self._is_on_duty
            )
            await self._dht.transport.serve(protocol_of(self._run_id), registrar.handle)
            self._ledger = ledger
            self.view_changed()
            while True:
                is_needed = await self._is_needed()
                if is_needed != self._is_on_duty:
                    self._is_on_duty = is_needed
                    log.info(
                        "no coordinator answers: this peer gives world ranks in its place"
                        if is_needed
                        else "world ranks are given by somebody else again"
                    )
                if is_needed:
                    await announce(self._dht, self._identity, self._run_id, self._admission, stands_in=True)
                await asyncio.sleep(ANNOUNCE_INTERVAL_S)

    def _forget_ledger(self) -> None:
        self._ledger = None

    async def _is_needed(self) -> bool:
        present = [rank for rank, peer in self._view().items() if peer.state != "leaving"]
        if self._world_rank != min(present, default=-1):
            return False
        for record in await coordinators(self._dht, self._run_id, self._admission.gate):
            if not record.stands_in and await self._dht.ping(
                record.peer_id, timeout_s=HOLDER_TIMEOUT_S, maddrs=record.maddrs
            ):
                return False
        return True
