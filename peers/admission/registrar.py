"""How the coordinator gives world ranks to peers.

What it is asked, and answers, is in peers/protocol/ranks.py.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable, Sequence

from msgspec.msgpack import Decoder
from msgspec.structs import replace

from peers.admission.ledger import RankLedger
from peers.admission.rank_request import MAX_REQUEST_BYTES
from peers.net.channel import Channel
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.protocol.ranks import AskRank, Grant, Taken
from peers.protocol.records import PEERS_KEY, Announcement
from peers.protocol.refusal import Refusal, Refused
from peers.timing import ANSWER_S, PROBE_S, START_S

ARRIVAL_S = START_S
"""A peer that was given a rank so recently counts as present, announced or not."""
_ASKED = Decoder(AskRank)

logger = logging.getLogger(__name__)


class Registrar:
    """Answers requests for ranks."""

    def __init__(self, run_id: str, ledger: RankLedger, dht: Dht, gate: Gate) -> None:
        self._run_id, self._ledger, self._dht, self._gate = run_id, ledger, dht, gate
        self._granted_at: dict[str, float] = {}

    async def handle(self, peer_id: str, sock: socket.socket) -> None:
        """Serve one stream, which may carry several requests."""
        with Channel(sock, max_message_bytes=MAX_REQUEST_BYTES) as channel:
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
        that took ranks while no coordinator was there keep them.
        """
        here = await announced(
            self._dht, PEERS_KEY(self._run_id), Announcement, self._run_id, self._gate.check_record
        )
        others = [r for r in here.values() if r.peer_id != peer_id and r.state != "leaving"]
        held = {record.world_rank: record for record in others}
        if wanted in held and await self._is_there(held[wanted].peer_id, held[wanted].maddrs):
            return Taken(held[wanted].peer_id)
        answer = self._ledger.assign(peer_id, wanted, avoid=frozenset(held))
        if isinstance(answer, Taken) and not await self._is_there(answer.holder):
            answer = self._ledger.assign(peer_id, wanted, evict=answer.holder)
        if not isinstance(answer, Grant):
            return answer
        return replace(answer, galaxy_size=self._num_around(peer_id, others))

    def _num_around(self, peer_id: str, others: Iterable[Announcement]) -> int:
        """Peers that are present or arriving, the asking one included. (The ledger also has dead ones.)"""
        now = time.monotonic()
        self._granted_at[peer_id] = now
        arriving = {peer for peer, at in self._granted_at.items() if now - at < ARRIVAL_S}
        return len(arriving | {record.peer_id for record in others})

    async def _is_there(self, peer_id: str, maddrs: Sequence[str] = ()) -> bool:
        return await self._dht.ping(peer_id, timeout_s=PROBE_S, maddrs=maddrs)
