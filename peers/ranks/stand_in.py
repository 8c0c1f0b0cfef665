"""A live peer in the coordinator's place, so that a run whose coordinator has died can still grow.

The lowest live world rank does it, while no coordinator answers. It knows the ranks of all peers that it has met, those
that are away included, and gives newcomers ranks of a range kept for that (peers/ranks/ledger.py). A coordinator that
comes back finds them in the DHT, and takes over again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence

from peers.access.service import AdmissionService
from peers.dht import Dht
from peers.identity import Identity
from peers.ranks.ledger import Ledger, of_stand_in
from peers.ranks.registrar import ANNOUNCE_INTERVAL_S, Registrar, announce, announcements
from peers.ranks.request import HOLDER_TIMEOUT_S, coordinators, protocol_of
from peers.records import Announcement

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
        view: Callable[[], Mapping[int, Announcement]],
    ) -> None:
        self._run_id, self._world_rank, self._identity = run_id, world_rank, identity
        self._dht, self._admission, self._view = dht, admission, view
        self._ledger: Ledger | None = None
        self._noted: dict[int, str] = {}
        """By world rank, the peer ids of this view that the ledger has."""
        self._is_on_duty = False
        self._was_lowest = False
        self._lowest_changed = asyncio.Event()

    def view_changed(self) -> None:
        """Remember who is there: whoever comes back without a number gets the one it had."""
        view = self._view()
        if self._is_lowest_of(view) != self._was_lowest:
            self._lowest_changed.set()
        if self._ledger is None:
            return
        self._noted = {rank: peer_id for rank, peer_id in self._noted.items() if rank in view}
        try:
            for rank, peer in view.items():
                # Views change many times a second among many; who is who does not.
                if self._noted.get(rank) != peer.peer_id:
                    holder = self._ledger.holder(rank)
                    if holder != peer.peer_id:
                        self._ledger.assign(peer.peer_id, rank, evict=holder)
                    self._noted[rank] = peer.peer_id
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
                self._run_id, ledger, self._dht, self._admission.gate, is_on_duty=self._may_answer
            )
            await self._dht.transport.serve(protocol_of(self._run_id), registrar.handle)
            self._ledger = ledger
            self.view_changed()
            while True:
                self._lowest_changed.clear()
                self._was_lowest = self._is_lowest()
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
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ANNOUNCE_INTERVAL_S):
                        await self._lowest_changed.wait()

    def _forget_ledger(self) -> None:
        self._ledger = None

    def _is_lowest(self) -> bool:
        return self._is_lowest_of(self._view())

    def _is_lowest_of(self, view: Mapping[int, Announcement]) -> bool:
        present = (rank for rank, peer in view.items() if peer.state != "leaving")
        return self._world_rank == min(present, default=-1)

    async def _may_answer(self) -> bool:
        """Where two gave ranks at once, one peer would get two: a lower one, announced but not met, goes first."""
        if not (self._is_on_duty and self._is_lowest()):
            return False
        view = self._view()
        for record in (await announcements(self._dht, self._run_id, self._admission.gate)).values():
            is_before = record.world_rank < self._world_rank and record.world_rank not in view
            if is_before and record.state != "leaving" and await self._answers(record.peer_id, record.maddrs):
                return False
        return self._is_lowest()

    async def _is_needed(self) -> bool:
        if not self._is_lowest():
            return False
        for record in await coordinators(self._dht, self._run_id, self._admission.gate):
            if not record.stands_in and await self._answers(record.peer_id, record.maddrs):
                return False
        return True

    async def _answers(self, peer_id: str, maddrs: Sequence[str]) -> bool:
        return await self._dht.ping(peer_id, timeout_s=HOLDER_TIMEOUT_S, maddrs=maddrs)
