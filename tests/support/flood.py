"""Garbage to all protocols and ports at once: random bytes, and messages cut short, too long, or with flipped bits."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from peers.errors import PeersError
from peers.net.paths.greeting import Hello
from peers.net.paths.tls import Credentials
from peers.protocol.admission import AskRank, Bans, Join, Proof
from peers.protocol.maddrs import Maddr, parse_maddr
from peers.protocol.mesh import Announced, Manifest, WantManifest
from peers.protocol.messages import Ask, Status
from peers.protocol.relays import Want
from peers.protocol.states import WantState
from peers.protocol.wire import Struct, encode
from tests.support.hostile import Hostile

PROTOCOLS = ("mesh", "data", "state", "relay", "relayed", "bans", "coordinator", "admission")
_ANSWER_S = 0.1
_FRAME_BYTES = 1 << 20


class Flood:
    """`hostile` sends the garbage. If it has a valid token, it is admitted before it sends."""

    def __init__(self, hostile: Hostile, coordinator: str, seed: int) -> None:
        self._hostile, self._random = hostile, random.Random(seed)
        self._coordinator = parse_maddr(coordinator)
        self.num_sent: Counter[str] = Counter()
        self.num_bytes = 0

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        peers = list(self._hostile.honest)
        jobs = [self._repeat(until, protocol, self._on_stream, peers, protocol) for protocol in PROTOCOLS]
        jobs += [
            self._repeat(until, f"port {where.port}", self._on_port, where) for where in self._ports(peers)
        ]
        await asyncio.gather(*jobs)

    def _ports(self, peers: Sequence[str]) -> list[Maddr]:
        honest = [self._hostile.honest[peer_id] for peer_id in peers]
        return [
            self._coordinator,
            *(parse_maddr(text) for peer in honest for text in (*peer.maddrs[:1], *peer.endpoints[:1])),
        ]

    async def _repeat(
        self, until: float, door: str, knock: Callable[..., Awaitable[None]], *arguments: object
    ) -> None:
        while time.monotonic() < until:
            # Every kind of refusal is expected.
            with contextlib.suppress(PeersError, OSError, TimeoutError):
                await knock(*arguments)
            self.num_sent[door] += 1
            await asyncio.sleep(0)

    async def _on_stream(self, peers: Sequence[str], protocol: str) -> None:
        hostile = self._hostile
        name = f"diloco/{hostile.run_id}/{protocol}"
        if protocol in ("coordinator", "admission"):
            to, maddrs = str(self._coordinator.peer_id), [str(self._coordinator)]
            sock = await hostile.dht.transport.open(to, name, timeout_s=2.0, maddrs=maddrs)
        else:
            sock = await hostile.stream(self._random.choice(peers), name)
        with sock:
            if protocol == "mesh":
                status = encode(hostile.announced())
                await self._send(sock, struct.pack("<I", len(status)) + status)
            await self._send(sock, self._garbage())

    async def _on_port(self, where: Maddr) -> None:
        with socket.socket() as sock:
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, (where.host, where.port))
            await self._send(sock, self._garbage())

    async def _send(self, sock: socket.socket, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.num_bytes += len(data)
        async with asyncio.timeout(2.0):
            await loop.sock_sendall(sock, data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await loop.sock_recv(sock, 1 << 16)

    def _garbage(self) -> bytes:
        kind, some = self._random.randrange(6), self._random
        if kind == 0:
            return some.randbytes(some.randrange(1, 8192))
        if kind == 1:
            return struct.pack("<I", 0xFFFF_FFFF) + some.randbytes(1000)
        if kind == 2:
            return struct.pack("<I", _FRAME_BYTES) + bytes([some.choice((0x91, 0xC0, 0x81))]) * _FRAME_BYTES
        if kind == 3:
            return Hello.of(Credentials.of(self._hostile.identity), plain=False).encode()[
                : some.randrange(1, 200)
            ]
        message = encode(some.choice(self._messages()))
        frame = bytearray(struct.pack("<I", len(message)) + message)
        if kind == 4:
            return bytes(frame[: some.randrange(1, len(frame))])
        for _ in range(3):
            frame[some.randrange(4, len(frame))] ^= 1 << some.randrange(8)
        return bytes(frame)

    def _messages(self) -> list[Struct]:
        head = next(iter(self._hostile.honest.values())).head
        return [
            self._hostile.announced(),
            Announced(record=self._random.randbytes(300)),
            Bans(signed=self._random.randbytes(300)),
            AskRank(wanted=None, token=self._hostile.claims.get("token", b"")),
            Join(),
            Proof(proof=self._random.randbytes(32)),
            Ask(head=head or "f" * 64),
            self._hostile.announced(
                Status(incarnation=1, sequence=1, world_rank=1, phase="ready", head=head)
            ),
            WantManifest(),
            Manifest(fields={"hv.local_steps": 5}),
            WantState(head=head or "f" * 64),
            Want(to=self._hostile.identity.peer_id),
        ]
