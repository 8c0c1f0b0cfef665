"""How a peer asks the coordinator of its run for a world rank, and how the coordinator gives it; the messages are in
peers/protocol/admission.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterable, Sequence

from msgspec.msgpack import Decoder

from peers.admission.ledger import RankLedger
from peers.errors import PeerUnreachable, ProtocolError, UserError
from peers.net.channel import Channel, call
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.protocol.admission import MAX_MESSAGE_BYTES, AskRank, Grant, Taken, coordinator_protocol
from peers.protocol.records import COORDINATOR_KEY, PEERS_KEY, Announcement, CoordinatorRecord
from peers.protocol.refusal import Refusal, Refused
from peers.timing import ANSWER_S, OFTEN_S, PROBE_S, RETRY_S, START_S

log = logging.getLogger(__name__)

_ANSWER: Decoder[Grant | Taken | Refusal] = Decoder(Grant | Taken | Refusal)


async def request_rank(
    dht: Dht,
    run_id: str,
    wanted: int | None,
    *,
    timeout_s: float,
    gate: Gate,
    token: bytes = b"",
) -> Grant | None:
    """Ask the run's coordinator for a world rank; None when no coordinator answers within `timeout_s`.

    `gate` decides who may be a coordinator; `token` is shown to it. Raises UserError if a
    coordinator refuses this peer, or says that another live peer holds the wanted rank, and no other coordinator grants
    one: in an open swarm strangers may claim to be coordinators. Asking again gives the same rank.
    """
    deadline = time.monotonic() + timeout_s
    # A peer that names its rank needs no coordinator, and most likely there is none.
    search_until = deadline if wanted is None else time.monotonic() + min(timeout_s, OFTEN_S)
    told = False
    while time.monotonic() < deadline:
        records = await coordinators(dht, run_id, gate)
        refused: UserError | None = None
        for record in records:
            try:
                # The announcement of a dead coordinator stays in the DHT for a while.
                left_s = min(ANSWER_S, deadline - time.monotonic())
                return await _ask(dht, record, wanted, token, timeout_s=left_s)
            except Refused as error:
                refused = refused or UserError(error.why.advice(dht.peer_id))
            except UserError as error:
                refused = refused or error
            except (PeerUnreachable, ProtocolError) as error:
                log.info("coordinator %s gave no rank: %s", record.peer_id, error)
        if refused is not None:
            raise refused
        # A coordinator announces itself before it prints its address. If the initial peers are others, one look-up of a
        # node that has just joined may miss it.
        was_told, told = told, wanted is not None and dht.is_answered and not dht.silent_initial_peers
        if not records and ((was_told and told) or time.monotonic() > search_until):
            break
        await asyncio.sleep(RETRY_S)
    return None


async def coordinators(dht: Dht, run_id: str, gate: Gate) -> list[CoordinatorRecord]:
    """All admitted peers that announce themselves as this run's coordinator: the initial peers, which the user has
    named, first; then the newest announcement."""
    found = await announced(dht, COORDINATOR_KEY(run_id), CoordinatorRecord, run_id, gate.check_record)
    return sorted(found.values(), key=lambda record: (record.peer_id not in dht.initial_peers, -record.time))


async def _ask(
    dht: Dht, record: CoordinatorRecord, wanted: int | None, token: bytes, *, timeout_s: float
) -> Grant:
    protocol = coordinator_protocol(record.run_id)
    with await call(
        dht.transport, record.peer_id, protocol, timeout_s=timeout_s, maddrs=record.maddrs
    ) as channel:
        await channel.send(AskRank(wanted=wanted, token=token), timeout_s)
        # The coordinator may have to ask the holder of the rank first.
        answer = await channel.read(_ANSWER, timeout_s + PROBE_S)
    return granted(answer, wanted)


def granted(answer: Grant | Taken | Refusal, wanted: int | None) -> Grant:
    """The grant. Raises UserError if the rank is taken, Refused for a refusal, ProtocolError for another rank."""
    match answer:
        case Grant(world_rank) if wanted in (None, world_rank):
            return answer
        case Taken(holder) if wanted is not None:
            raise UserError(
                f"world rank {wanted} is taken by the live peer {holder:.64}; give another --world-rank, or none and "
                "the coordinator assigns one"
            )
        case Refusal(why):
            raise Refused(why)
    raise ProtocolError(f"not an answer to a request for world rank {wanted}: {answer!r:.200}")


ARRIVAL_S = START_S
"""A peer that was given a rank less than this long ago counts as present, announced or not."""
_ASKED = Decoder(AskRank)


class Registrar:
    """Answers requests for ranks."""

    def __init__(self, run_id: str, ledger: RankLedger, dht: Dht, gate: Gate) -> None:
        self._run_id, self._ledger, self._dht, self._gate = run_id, ledger, dht, gate
        self._granted_at: dict[str, float] = {}

    async def handle(self, peer_id: str, sock: socket.socket) -> None:
        """Serve one stream, which may carry several requests."""
        with Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES) as channel:
            while True:
                asked = await channel.read(_ASKED, ANSWER_S)
                try:
                    self._gate.check(peer_id, asked.token, "coordinator")
                except Refused as error:
                    await channel.send_last(Refusal(why=error.why), ANSWER_S)
                    return
                await channel.send(await self.assign(peer_id, asked.wanted), ANSWER_S)

    async def assign(self, peer_id: str, wanted: int | None) -> Grant | Taken:
        """As RankLedger.assign, but a holder that does not answer loses the rank to a peer that asks for it. Peers
        that took ranks while no coordinator was there keep them, unless the ledger's own holder asks for one.
        """
        here = await announced(
            self._dht, PEERS_KEY(self._run_id), Announcement, self._run_id, self._gate.check_record
        )
        others = [r for r in here.values() if r.peer_id != peer_id and r.state != "leaving"]
        held = {record.world_rank: record for record in others}
        # What another peer claims about itself does not refuse the holder.
        is_own = wanted is not None and self._ledger.holder(wanted) == peer_id
        if wanted in held and not is_own and await self._is_there(held[wanted].peer_id, held[wanted].maddrs):
            return Taken(held[wanted].peer_id)
        present, avoid = self._present(others) - {peer_id}, frozenset(held)
        answer = self._ledger.assign(peer_id, wanted, avoid=avoid, present=present)
        while isinstance(answer, Taken):
            holder, is_there = answer.holder, await self._is_there(answer.holder)
            if is_there and wanted is not None:
                return answer
            if is_there:
                present.add(holder)
            answer = self._ledger.assign(
                peer_id, wanted, evict=None if is_there else holder, avoid=avoid, present=present
            )
        self._granted_at[peer_id] = time.monotonic()
        return Grant(world_rank=answer, galaxy_size=len(present | {peer_id}))

    def _present(self, others: Iterable[Announcement]) -> set[str]:
        """The peers that are present or arriving. (The ledger also contains dead ones.)"""
        now = time.monotonic()
        self._granted_at = {peer: at for peer, at in self._granted_at.items() if now - at < ARRIVAL_S}
        return self._granted_at.keys() | {record.peer_id for record in others}

    async def _is_there(self, peer_id: str, maddrs: Sequence[str] = ()) -> bool:
        return await self._dht.ping(peer_id, timeout_s=PROBE_S, maddrs=maddrs)
