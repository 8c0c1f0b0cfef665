from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from msgspec.msgpack import Decoder

from benchmarks.chaos.links import free_port
from peers.errors import PeerUnreachable, UserError
from peers.net.channel import Channel
from peers.net.identity import load_or_create
from peers.net.libp2p.p2pd import P2pd
from peers.protocol.wire import Struct
from tests.support.members import joined
from tests.support.swarm import wait_until

PROTOCOL = "test/stream"
NOBODY = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


class Word(Struct, frozen=True):
    word: bytes


class Accepted:
    """A handler that passes each stream to the next call of `next`."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, socket.socket]] = asyncio.Queue()

    async def __call__(self, peer_id: str, sock: socket.socket) -> None:
        self._queue.put_nowait((peer_id, sock))

    async def next(self) -> tuple[str, socket.socket]:
        return await asyncio.wait_for(self._queue.get(), 10)


async def test_a_stream_carries_messages_both_ways_and_names_its_caller(tmp_path, bootstrap):
    async with joined(tmp_path, "a", bootstrap) as a, joined(tmp_path, "b", bootstrap) as b:
        accepted = Accepted()
        await b.transport.serve(PROTOCOL, accepted)
        mine = Channel(await a.transport.open(b.peer_id, PROTOCOL, timeout_s=10))
        caller, sock = await accepted.next()
        theirs = Channel(sock)
        assert caller == a.peer_id
        for sender, receiver, word in ((mine, theirs, b"question"), (theirs, mine, b"\0" * 100_000)):
            await sender.send(Word(word=word))
            assert await receiver.read(Decoder(Word), 10) == Word(word=word)
        mine.close()
        with pytest.raises(PeerUnreachable):
            await theirs.read(Decoder(Word), 10)
        theirs.close()


async def test_what_was_sent_before_closing_is_delivered(tmp_path, bootstrap):
    async with joined(tmp_path, "a", bootstrap) as a, joined(tmp_path, "b", bootstrap) as b:
        accepted = Accepted()
        await b.transport.serve(PROTOCOL, accepted)
        out = await a.transport.open(b.peer_id, PROTOCOL, timeout_s=10)
        _, incoming = await accepted.next()
        payload = os.urandom(8 << 20)
        out.setblocking(True)
        incoming.settimeout(10)
        sender = threading.Thread(target=lambda: (out.sendall(payload), out.close()))
        sender.start()
        received = bytearray()
        while piece := await asyncio.to_thread(incoming.recv, 1 << 16):
            received += piece
        sender.join()
        incoming.close()
        assert received == payload


async def test_two_peers_that_dial_each_other_at_once_both_get_through(tmp_path, bootstrap):
    async with joined(tmp_path, "a", bootstrap) as a, joined(tmp_path, "b", bootstrap) as b:
        for peer in (a, b):
            await peer.transport.serve(PROTOCOL, Accepted())
        streams = await asyncio.gather(
            a.transport.open(b.peer_id, PROTOCOL, timeout_s=15, maddrs=await b.maddrs()),
            b.transport.open(a.peer_id, PROTOCOL, timeout_s=15, maddrs=await a.maddrs()),
        )
        for sock in streams:
            sock.close()


async def test_its_port_is_shared_with_nobody_so_that_it_is_not_dialled_from_either(tmp_path):
    """If both sides dialled from such a port at once, TCP would make one connection that both sides had opened."""
    keys = [tmp_path / "a", tmp_path / "b"]
    for key in keys:
        load_or_create(key)
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    first = await P2pd.start(identity_path=keys[0], host_maddrs=[address])
    try:
        with pytest.raises(UserError, match="address already in use"):
            await P2pd.start(identity_path=keys[1], host_maddrs=[address])
    finally:
        await first.stop()


async def test_a_protocol_nobody_serves_and_a_peer_nobody_knows_are_unreachable(tmp_path, bootstrap):
    async with joined(tmp_path, "a", bootstrap) as a, joined(tmp_path, "b", bootstrap) as b:
        with pytest.raises(PeerUnreachable, match="protocols not supported"):
            await a.transport.open(b.peer_id, "test/none", timeout_s=5)
        with pytest.raises(PeerUnreachable, match=NOBODY):
            await a.transport.open(NOBODY, PROTOCOL, timeout_s=0.5)
        with pytest.raises(PeerUnreachable, match="connection refused"):
            await a.transport.open(NOBODY, PROTOCOL, timeout_s=5, maddrs=["/ip4/127.0.0.1/tcp/1"])
        await a.close()
        with pytest.raises(PeerUnreachable, match="p2pd is gone"):
            await a.transport.open(b.peer_id, PROTOCOL, timeout_s=5)


def has_stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


async def test_a_ping_tells_the_living_from_the_stopped_and_the_dead(tmp_path, bootstrap):
    async with joined(tmp_path, "a", bootstrap) as a, joined(tmp_path, "b", bootstrap) as b:
        assert await a.ping(b.peer_id, timeout_s=10)
        os.kill(b.p2pd_pid, signal.SIGSTOP)
        # Its threads run on until the one that handles the signal is scheduled.
        wait_until(lambda: has_stopped(b.p2pd_pid), "the stop")
        assert not await a.ping(b.peer_id, timeout_s=0.3)
        os.kill(b.p2pd_pid, signal.SIGCONT)
        assert await a.ping(b.peer_id, timeout_s=10)
        os.kill(b.p2pd_pid, signal.SIGKILL)
        assert not await a.ping(b.peer_id, timeout_s=1)


async def test_a_handler_that_fails_costs_its_own_stream_only(tmp_path, bootstrap):
    async with joined(tmp_path, "a", bootstrap) as a, joined(tmp_path, "b", bootstrap) as b:
        answers = iter([PeerUnreachable("on purpose"), None])

        async def handler(_peer_id: str, sock: socket.socket) -> None:
            if (error := next(answers)) is not None:
                raise error
            sock.send(b"!")
            sock.close()

        await b.transport.serve(PROTOCOL, handler)
        replies = []
        for _ in range(2):
            sock = await a.transport.open(b.peer_id, PROTOCOL, timeout_s=10)
            replies.append(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), 10))
            sock.close()
        assert replies == [b"", b"!"]
