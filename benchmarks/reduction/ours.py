"""Our reduction over our streams, which are kept open between rounds as in the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.reduction import vectors
from benchmarks.reduction.seats import Seat
from peers.net.streams import StreamPool
from peers.net.transport import StreamTransport
from peers.reduce.all_reduce import reduce_pseudo_gradients
from peers.reduce.arithmetic import norm_of_pseudo_gradient
from peers.reduce.plan import ATTEMPT_BYTES, ReducePlan, equal_bounds

_PROTOCOL = "benchmark/reduce"
_TIMEOUT_S = 60.0

TRANSPORTS = ("tcp", "tls", "libp2p")


@dataclass(frozen=True)
class Ours:
    codec: str
    transport: str

    @property
    def name(self) -> str:
        return f"ours {self.codec} {self.transport}"

    def missing(self) -> str:
        return ""

    def take_part(self, seat: Seat) -> None:
        asyncio.run(self._take_part(seat))

    async def _take_part(self, seat: Seat) -> None:
        async with _TRANSPORTS[self.transport](seat) as (transport, peer_ids):
            pool = StreamPool(transport, _PROTOCOL)
            await pool.start()
            await asyncio.to_thread(seat.meet)
            await self._reduce(seat, pool, {other: peer_ids[other] for other in seat.others})
            await pool.close()

    async def _reduce(self, seat: Seat, pool: StreamPool, peer_ids: dict[int, str]) -> None:
        anchor = vectors.anchor(seat.numel)
        local = anchor - vectors.delta(seat.index, seat.numel)
        result = torch.empty(seat.numel)
        norms = tuple(seat.meet(norm_of_pseudo_gradient(anchor, local)))
        for number in seat.rounds(result, 3 * 4 * seat.numel):
            plan = ReducePlan(
                attempt=number.to_bytes(ATTEMPT_BYTES, "big"),
                members=tuple(range(seat.num_peers)),
                me=seat.index,
                weights=(1 / seat.num_peers,) * seat.num_peers,
                norms=norms,
                bounds=equal_bounds(seat.numel, seat.num_peers),
                codec=self.codec,
            )
            streams = await pool.connect(plan.attempt, peer_ids, timeout_s=_TIMEOUT_S)
            await asyncio.to_thread(
                reduce_pseudo_gradients,
                plan,
                anchor,
                local,
                result,
                streams.send,
                streams.receive,
                stall_timeout_s=_TIMEOUT_S,
                cancelled=threading.Event(),
            )
            pool.give_back(streams)


@contextlib.asynccontextmanager
async def _direct(seat: Seat, *, plain: bool) -> AsyncIterator[tuple[StreamTransport, list[str]]]:
    from peers.net.identity import load_or_create
    from peers.net.paths.acceptor import Acceptor
    from peers.net.paths.direct import Direct
    from peers.net.paths.tls import Credentials

    identity = load_or_create(seat.directory / f"{seat.index}.key")
    endpoints: dict[str, str] = {}
    acceptor = Acceptor(Credentials.of(identity), allows=endpoints.__contains__, plain=plain)
    direct = Direct(acceptor, lambda peer_id: [endpoints[peer_id]])
    direct.listen("/ip4/127.0.0.1/tcp/0")
    try:
        peer_ids = await asyncio.to_thread(seat.meet, identity.peer_id)
        ports = await asyncio.to_thread(seat.meet, direct.port)
        endpoints.update(
            (peer_id, f"/ip4/127.0.0.1/tcp/{port}") for peer_id, port in zip(peer_ids, ports, strict=True)
        )
        yield direct, peer_ids
    finally:
        await direct.close()
        identity.release()


@contextlib.asynccontextmanager
async def _libp2p(seat: Seat) -> AsyncIterator[tuple[StreamTransport, list[str]]]:
    from peers.net.dht.node import Dht
    from peers.net.identity import load_or_create

    identity = load_or_create(seat.directory / f"{seat.index}.key")
    initial_peers: list[str] = []
    if seat.index:
        initial_peers = (await asyncio.to_thread(seat.meet))[0]
    dht = await Dht.join(
        identity=identity, initial_peers=initial_peers, host_maddrs=("/ip4/127.0.0.1/tcp/0",)
    )
    try:
        if not seat.index:
            await asyncio.to_thread(seat.meet, await dht.maddrs())
        yield dht.transport, await asyncio.to_thread(seat.meet, dht.peer_id)
    finally:
        await dht.close()
        identity.release()


_TRANSPORTS = {"tcp": partial(_direct, plain=True), "tls": partial(_direct, plain=False), "libp2p": _libp2p}
