"""A hostile peer that claims to be the coordinator of the run, and to be newer than the real one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from msgspec.msgpack import Decoder

from peers.admission.ranks import coordinators
from peers.net.channel import Channel
from peers.net.gate import Gate
from peers.protocol.admission import AskRank, Grant, coordinator_protocol
from peers.protocol.records import COORDINATOR_KEY, CoordinatorRecord
from peers.protocol.wire import Struct
from tests.support.hostile import Hostile

Answer = Struct | bytes | None
"""A message, bytes that are no message, or None: no answer at all."""

GRANT = Grant(world_rank=7, galaxy_size=1)
_ASKED = Decoder(AskRank)


class FalseCoordinator:
    """Gives everybody who asks for a rank the same answer."""

    def __init__(self, hostile: Hostile, answer: Answer) -> None:
        self._hostile, self._answer = hostile, answer
        self.asked: list[str] = []

    async def begin(self) -> None:
        """Announce itself from now on."""
        self.address = (await self._hostile.dht.maddrs())[0]
        await self._hostile.dht.transport.serve(coordinator_protocol(self._hostile.run_id), self._handle)
        await self._announce()
        self._hostile.spawn(self._announce_forever())

    async def is_the_newest(self) -> bool:
        known = await coordinators(self._hostile.dht, self._hostile.run_id, Gate(self._hostile.run_id))
        return len(known) > 1 and max(known, key=lambda record: record.time).peer_id == self.peer_id

    @property
    def peer_id(self) -> str:
        return self._hostile.identity.peer_id

    async def _announce_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self._announce()

    async def _announce(self) -> None:
        dht, identity = self._hostile.dht, self._hostile.identity
        # As far in the future as clocks may differ.
        record = CoordinatorRecord(
            peer_id=dht.peer_id,
            run_id=self._hostile.run_id,
            maddrs=tuple(await dht.maddrs()),
            time=time.time() + 8.0,
            token=self._hostile.claims.get("token", b""),
        )
        await dht.store(COORDINATOR_KEY(self._hostile.run_id), dht.peer_id, record.encode(identity), 30.0)

    async def _handle(self, peer_id: str, sock: Any) -> None:
        self.asked.append(peer_id)
        with sock:
            if isinstance(self._answer, bytes):
                await asyncio.get_running_loop().sock_sendall(sock, self._answer)
                return
            channel = Channel(sock)
            await channel.read(_ASKED, 5.0)
            if self._answer is not None:
                await channel.send(self._answer, 5.0)
            await asyncio.sleep(60.0)
