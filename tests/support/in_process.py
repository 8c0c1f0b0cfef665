"""Transports between peers in one process, joined by socket pairs."""

from __future__ import annotations

import asyncio
import socket
import time

from peers.errors import PeersError, PeerUnreachable


class Network:
    """Pairs of peers in `cut` cannot connect; pairs in `slow` cannot either, but fail only after the timeout."""

    def __init__(self):
        self.handlers, self.cut, self.slow, self.opened, self.tasks = {}, set(), set(), [], set()

    def transport(self, peer_id):
        return Endpoint(self, peer_id)

    def spawn(self, coroutine):
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_error):
        await self.close()

    async def close(self):
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Endpoint:
    """The transport of one peer. An error of a handler closes its stream, as in peers/net/libp2p/transport.py."""

    def __init__(self, network, peer_id):
        self.network, self.peer_id = network, peer_id

    async def open(self, peer_id, protocol, *, timeout_s, maddrs=()):
        pair = frozenset({self.peer_id, peer_id})
        if pair in self.network.slow:
            await asyncio.sleep(timeout_s)
        handler = self.network.handlers.get((peer_id, protocol))
        if pair in self.network.cut | self.network.slow or handler is None:
            raise PeerUnreachable(f"nobody there serves {protocol} to {self.peer_id}")
        self.network.opened.append(protocol)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)

        async def handle():
            try:
                await handler(self.peer_id, theirs)
            except (PeersError, OSError):
                theirs.close()

        self.network.spawn(handle())
        return ours

    async def serve(self, protocol, handler):
        self.network.handlers[self.peer_id, protocol] = handler

    async def connected_peers(self):
        others = {peer_id for peer_id, _ in self.network.handlers} - {self.peer_id}
        lost = self.network.cut | self.network.slow
        return {other for other in others if frozenset({self.peer_id, other}) not in lost}


async def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
