"""A malicious peer with its own identity, which speaks the swarm's protocols.

It lives in a thread with its own event loop, DHT node and p2pd; tests tell it what to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from msgspec.msgpack import Decoder
from msgspec.structs import replace

from peers.errors import PeersError, PeerUnreachable
from peers.net.channel import Channel
from peers.net.dht.node import Dht
from peers.net.identity import load_or_create
from peers.protocol.admission import Bans
from peers.protocol.mesh import Announced, Carried, Introduction, Manifest, Ping, Pong, Said, WantManifest
from peers.protocol.messages import Message, Status
from peers.protocol.records import PEERS_KEY, Announcement, Spoken

T = TypeVar("T")
INTRODUCTION: Decoder[Introduction] = Decoder(Introduction)
SAID: Decoder[Said] = Decoder(Said)

OnMessage = Callable[["Hostile", Channel, Carried], Coroutine[Any, Any, None]]
OnSaid = Callable[["Hostile", str, Message], Coroutine[Any, Any, None]]
"""Arguments: the hostile peer, the id of an honest peer, and the message that this peer has sent."""


class Hostile:
    """A context manager. `claims`: fields of its announcement that differ from the best honest peer's."""

    def __init__(self, directory: Path, initial_peers: list[str], run_id: str, **claims: Any) -> None:
        self._directory, self._initial_peers, self.run_id = directory, initial_peers, run_id
        self.claims: dict[str, Any] = {
            "world_rank": 900,
            "state": "joining",
            # Others drop announcements of an earlier incarnation.
            "incarnation": time.time_ns(),
            **claims,
        }
        self.follows = False
        """Whether it claims to have the honest peers' head, and to average."""
        self.honest: dict[str, Announcement] = {}
        self.on_message: OnMessage | None = None
        self.on_said: OnSaid | None = None
        self.statuses: dict[str, Status] = {}
        """The newest status of each honest peer."""
        self._sequence = self._number = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.channels: dict[str, Channel] = {}

    def __enter__(self) -> Hostile:
        self._thread.start()
        try:
            self.call(self._enter())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(PeersError, OSError):
            self.call(self._leave())
        self._stop()

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def announcement(self) -> Announcement:
        model = max(self.honest.values(), key=lambda peer: (peer.epoch, peer.committed_tokens))
        claims = {
            **({"state": "averaging"} if self.follows else {"head": "", "anchor_digest": ""}),
            **self.claims,
        }
        claims |= {"peer_id": self.identity.peer_id, "maddrs": (), "time": time.time()}
        return replace(model, **claims)

    def announced(self, status: Status | None = None) -> Announced:
        self._number += 1
        said = Spoken.of(self.announcement(), status, self._number)
        return Announced(record=said.encode(self.identity))

    async def stream(self, peer_id: str, protocol: str) -> socket.socket:
        maddrs = self.honest[peer_id].maddrs
        return await self.dht.transport.open(peer_id, protocol, timeout_s=10.0, maddrs=maddrs)

    async def meet(self, peer_id: str) -> Channel:
        """Open a channel of the mesh, which is kept alive with announcements."""
        channel = Channel(await self.stream(peer_id, f"diloco/{self.run_id}/mesh"))
        await channel.send(self.announced(), 10.0)
        self._hear(peer_id, await channel.read(INTRODUCTION, 10.0))
        self.channels[peer_id] = channel
        self.spawn(self._listen(peer_id, channel))
        self.spawn(self._talk(channel))
        return channel

    async def meet_all(self) -> None:
        met = await asyncio.gather(*(self.meet(peer_id) for peer_id in self.honest), return_exceptions=True)
        for peer_id, outcome in zip(list(self.honest), met, strict=True):
            if isinstance(outcome, PeersError):
                # The record of a peer that has just been killed.
                del self.honest[peer_id]
            elif isinstance(outcome, BaseException):
                raise outcome

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def say(self, peer_id: str, message: Message) -> None:
        """Send a message over the mesh. Does nothing if the channel is broken."""
        with contextlib.suppress(PeersError, OSError, KeyError):
            said = self.announced(message) if isinstance(message, Status) else message
            await self.channels[peer_id].send(said, 5.0)

    def standing(self, **fields: Any) -> Status:
        """A status of its own, newer than all earlier ones."""
        self._sequence += 1
        usual = {"incarnation": 1, "sequence": self._sequence, "world_rank": self.claims["world_rank"]}
        return Status(**{**usual, "phase": "ready", **fields})

    async def announce(self) -> None:
        """Announce itself in the DHT, where newcomers look for peers."""
        blob = replace(self.announcement(), maddrs=tuple(await self.dht.maddrs())).encode(self.identity)
        await self.dht.store(PEERS_KEY(self.run_id), self.identity.peer_id, blob, ttl_s=30.0)

    async def babble(self, peer_id: str, protocol: str, seed: int, num_bytes: int = 4096) -> None:
        """Send random bytes on a stream of this protocol, and keep the stream open for a moment."""
        with contextlib.suppress(PeerUnreachable, OSError, TimeoutError):
            sock = await self.stream(peer_id, protocol)
            with sock:
                await self._loop.sock_sendall(sock, random.Random(seed).randbytes(num_bytes))
                async with asyncio.timeout(0.2):
                    await self._loop.sock_recv(sock, 1 << 16)

    async def _enter(self) -> None:
        self.identity = load_or_create(self._directory / "hostile.key")
        self.dht = await Dht.join(
            identity=self.identity, initial_peers=self._initial_peers, host_maddrs=("/ip4/127.0.0.1/tcp/0",)
        )
        for peer_id, blob in (await self.dht.get(PEERS_KEY(self.run_id))).items():
            with contextlib.suppress(PeersError):
                record = Announcement.decode(peer_id, blob, time.time(), run_id=self.run_id)
                if record.world_rank < 100:
                    self.honest[peer_id] = record

    async def _leave(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in self.channels.values():
            channel.close()
        await self.dht.close()
        # Hivemind leaves some tasks behind.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _hear(self, peer_id: str, message: Introduction | Said) -> None:
        if isinstance(message, Announced):
            spoken = Spoken.decode(peer_id, message.record, time.time())
            fields = {name: getattr(spoken, name) for name in Announcement.__struct_fields__}
            self.honest[peer_id] = Announcement(**fields)
            if spoken.status is not None:
                self.statuses[peer_id] = spoken.status

    async def _listen(self, peer_id: str, channel: Channel) -> None:
        with contextlib.suppress(PeersError, OSError):
            while True:
                message = await channel.read(SAID, 20.0)
                before = self.honest[peer_id].head
                self._hear(peer_id, message)
                match message:
                    case Announced():
                        if self.follows and self.honest[peer_id].head != before:
                            await channel.send(self.announced(), 5.0)
                        if self.on_said and peer_id in self.statuses:
                            await self.on_said(self, peer_id, self.statuses[peer_id])
                    case Manifest() | WantManifest():
                        if self.on_message:
                            await self.on_message(self, channel, message)
                    case Bans() | Ping() | Pong():
                        pass
                    case _:
                        if self.on_said:
                            await self.on_said(self, peer_id, message)

    async def _talk(self, channel: Channel) -> None:
        with contextlib.suppress(PeersError, OSError):
            while True:
                await channel.send(self.announced(), 5.0)
                await asyncio.sleep(0.3)
