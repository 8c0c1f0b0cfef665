import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time

import pytest

from peers.errors import PeerUnreachable
from peers.net.paths import paths as paths_module
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.direct import Direct
from peers.net.paths.paths import Paths
from peers.net.streams import StreamPool
from peers.protocol.records import Path
from peers.timing import START_S
from tests.support.in_process import Network, until
from tests.support.keys import credentials

DATA, BULK, CONTROL = "run/data", "run/state", "run/control"
BIG = 64 << 20


@pytest.fixture
def patient(monkeypatch):
    """A direct stream is used where one is possible, however long a busy machine takes for the greeting."""
    monkeypatch.setattr(paths_module, "DIRECT_HEAD_START_S", 60.0)


class StandIn:
    """A relay as its caller sees it: it returns one end of a socket pair."""

    def __init__(self, works=True):
        self.works, self.num_asked = works, 0

    async def open(self, peer_id, protocol, *, timeout_s, maddrs=()):
        self.num_asked += 1
        if not self.works:
            raise PeerUnreachable("nobody relays")
        ours, self.theirs = socket.socketpair()
        return ours


class Peer:
    def __init__(self, me, network, endpoints, mode, relay=None):
        self.peer_id, self.endpoints = me.peer_id, endpoints
        self.acceptor = Acceptor(me, allows=lambda _: True)
        self.direct = Direct(self.acceptor, lambda peer_id: endpoints.get(peer_id, ()))
        self.direct.listen("/ip4/127.0.0.1/tcp/0")
        endpoints[me.peer_id] = [f"/ip4/127.0.0.1/tcp/{self.direct.port}"]
        self.paths = Paths(
            libp2p=network.transport(me.peer_id),
            acceptor=self.acceptor,
            direct=self.direct if mode != "libp2p" else None,
            relay=relay,
            data=DATA,
            bulk={BULK},
        )
        self.pool = StreamPool(self.paths, DATA, self.paths)


@contextlib.asynccontextmanager
async def pair(directory, mode="auto", relay=None):
    network, endpoints = Network(), {}
    made = [Peer(credentials(directory, name), network, endpoints, mode, relay) for name in "ab"]
    for peer in made:
        await peer.pool.start()

        async def ignored(_peer_id, stream):
            stream.close()

        await peer.paths.serve(CONTROL, ignored)
        await peer.paths.serve(BULK, ignored)
    try:
        yield network, *made
    finally:
        for peer in made:
            await peer.pool.close()
            await peer.direct.close()
        await network.close()


async def a_round(a, b, *, num_bytes=BIG, seconds=1.0, fails=False):
    """One attempt of both peers. Returns the path of the bytes from `a`."""
    attempt = os.urandom(16)
    ours, theirs = await asyncio.gather(
        a.pool.connect(attempt, {1: b.peer_id}, timeout_s=10),
        b.pool.connect(attempt, {0: a.peer_id}, timeout_s=10),
    )
    ours.send[1].sendall(b"bytes")
    theirs.receive[0].settimeout(10)
    assert theirs.receive[0].recv(10) == b"bytes"
    for peer, streams, other in ((a, ours, 1), (b, theirs, 0)):
        if fails:
            peer.pool.discard(streams, {other})
        else:
            peer.pool.give_back(streams, sent_bytes=num_bytes, seconds=seconds)
    path = a.paths.in_use[b.peer_id]
    await until(lambda: not (a.pool._opening or b.pool._opening))
    return path


@pytest.mark.usefixtures("patient")
async def test_data_goes_direct_from_the_first_round_on_and_over_libp2p_where_nobody_answers(
    tmp_path, caplog
):
    with caplog.at_level(logging.INFO, "peers.net.paths.paths"):
        async with pair(tmp_path) as (network, a, b):
            assert [await a_round(a, b) for _ in range(3)] == [Path.DIRECT] * 3
            assert DATA not in network.opened
            assert a.paths.rate_to(b.peer_id) == BIG
        async with pair(tmp_path) as (network, a, b):
            a.endpoints |= {peer.peer_id: ["/ip4/127.0.0.1/tcp/1"] for peer in (a, b)}
            assert [await a_round(a, b) for _ in range(3)] == [Path.LIBP2P] * 3
            assert network.opened.count(DATA) == 2
    assert sum("goes by" in message for message in caplog.messages) == 4


@pytest.mark.usefixtures("patient")
async def test_data_moves_to_a_direct_stream_once_that_stands(tmp_path):
    async with pair(tmp_path) as (_, a, b):
        for peer, other in ((a, b), (b, a)):
            peer.paths._to(other.peer_id).direct_failures.failed(time.monotonic())
        assert await a_round(a, b) is Path.LIBP2P
        for peer, other in ((a, b), (b, a)):
            peer.paths._to(other.peer_id).direct_failures.until -= START_S
        await a_round(a, b)
        assert await a_round(a, b) is Path.DIRECT


async def test_a_direct_stream_that_is_only_slow_carries_the_second_round(tmp_path, monkeypatch):
    monkeypatch.setattr(paths_module, "DIRECT_HEAD_START_S", 0.0)
    async with pair(tmp_path) as (_, a, b):
        assert [await a_round(a, b) for _ in range(3)] == [Path.LIBP2P, Path.DIRECT, Path.DIRECT]


@pytest.mark.usefixtures("patient")
async def test_peers_that_are_only_talked_of_push_none_out_that_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(paths_module, "_MAX_PEERS", 4)
    async with pair(tmp_path) as (_, a, b):
        for number in range(10):
            await a_round(a, b)
            with pytest.raises(PeerUnreachable):
                await a.paths.open(f"nobody {number}", CONTROL, timeout_s=1)
        assert a.paths.in_use[b.peer_id] is Path.DIRECT
        assert len(a.paths._paths_to) == 4


@pytest.mark.usefixtures("patient")
async def test_a_round_lost_on_a_direct_stream_is_followed_by_one_on_libp2p(tmp_path):
    async with pair(tmp_path) as (_, a, b):
        assert await a_round(a, b, fails=True) is Path.DIRECT
        assert await a_round(a, b) is Path.LIBP2P
        assert await a_round(a, b) is Path.LIBP2P


async def test_control_stays_on_libp2p_and_libp2p_mode_never_goes_direct(tmp_path):
    async with pair(tmp_path) as (_, a, b):
        (await a.paths.open(b.peer_id, CONTROL, timeout_s=5)).close()
        assert a.paths.in_use == {b.peer_id: Path.LIBP2P}
    async with pair(tmp_path, "libp2p") as (_, a, b):
        assert [await a_round(a, b) for _ in range(3)] == [Path.LIBP2P] * 3


async def test_a_state_goes_direct_from_the_first_stream_on_and_else_as_control_does(tmp_path, monkeypatch):
    async with pair(tmp_path) as (network, a, b):
        monkeypatch.setattr(paths_module, "DIRECT_HEAD_START_S", 60.0)
        stream = await a.paths.open(b.peer_id, BULK, timeout_s=5)
        assert isinstance(stream, ssl.SSLSocket) and not network.opened
        stream.close()
        # If one direct stream works, the rounds' streams go direct too.
        assert await a_round(a, b) is Path.DIRECT
    monkeypatch.undo()
    async with pair(tmp_path) as (network, a, b):
        with socket.create_server(("127.0.0.1", 0), backlog=1) as silent:
            silent_maddr = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
            for endpoint in (silent_maddr, "/ip4/127.0.0.1/tcp/1"):
                a.endpoints[b.peer_id] = [endpoint]
                (await a.paths.open(b.peer_id, BULK, timeout_s=5)).close()
                assert network.opened.pop() == BULK
    async with pair(tmp_path, "libp2p") as (network, a, b):
        (await a.paths.open(b.peer_id, BULK, timeout_s=5)).close()
        assert network.opened == [BULK]


async def test_a_third_peer_is_asked_only_where_libp2p_has_no_connection(tmp_path):
    relay = StandIn()
    async with pair(tmp_path, "libp2p", relay) as (network, a, b):
        with pytest.raises(PeerUnreachable, match="nobody there"):
            await a.paths.open(b.peer_id, "run/unserved", timeout_s=5)
        assert not relay.num_asked
        network.cut.add(frozenset({a.peer_id, b.peer_id}))
        (await a.paths.open(b.peer_id, CONTROL, timeout_s=5)).close()
        assert a.paths.in_use == {b.peer_id: Path.RELAY}
        relay.works = False
        with pytest.raises(PeerUnreachable, match="nobody there"):
            await a.paths.open(b.peer_id, CONTROL, timeout_s=5)


async def test_packets_that_vanish_delay_a_relayed_stream_once_only(tmp_path, monkeypatch):
    monkeypatch.setattr(paths_module, "LIBP2P_HEAD_START_S", 0.3)
    async with pair(tmp_path, "libp2p", StandIn()) as (network, a, b):
        network.slow.add(frozenset({a.peer_id, b.peer_id}))
        started = time.monotonic()
        (await a.paths.open(b.peer_id, CONTROL, timeout_s=30)).close()
        assert time.monotonic() - started >= 0.3
        # If libp2p went first again, the timeout would end before the relay's turn.
        monkeypatch.setattr(paths_module, "LIBP2P_HEAD_START_S", 60.0)
        (await a.paths.open(b.peer_id, CONTROL, timeout_s=30)).close()


async def test_a_relayed_pair_moves_to_libp2p_once_that_connects(tmp_path):
    relay = StandIn()
    async with pair(tmp_path, "libp2p", relay) as (network, a, b):
        cut = frozenset({a.peer_id, b.peer_id})
        network.cut.add(cut)
        relayed = await a.paths.open(b.peer_id, DATA, timeout_s=5)
        assert await a.paths.improved(b.peer_id, relayed) is None
        network.cut.remove(cut)
        better = await a.paths.improved(b.peer_id, relayed)
        assert a.paths.in_use == {b.peer_id: Path.LIBP2P}
        for stream in (relayed, relay.theirs, better):
            stream.close()


@pytest.mark.usefixtures("patient")
async def test_whoever_did_not_answer_is_reached_through_a_third_peer_until_a_direct_stream_stands(tmp_path):
    relay = StandIn()
    async with pair(tmp_path, "auto", relay) as (_, a, b):
        assert await a_round(a, b) is Path.DIRECT
        standing = await a.paths.open(b.peer_id, DATA, timeout_s=5)
        assert not a.paths.may_be_dead(b.peer_id, standing)
        a.paths.no_answer(b.peer_id)
        assert a.paths.may_be_dead(b.peer_id, standing)
        relayed = await a.paths.open(b.peer_id, DATA, timeout_s=5)
        assert a.paths.in_use == {b.peer_id: Path.RELAY}
        assert not a.paths.may_be_dead(b.peer_id, relayed)
        better = await a.paths.improved(b.peer_id, relayed)
        assert a.paths.in_use == {b.peer_id: Path.DIRECT}
        # The greeting on `better` has shown that the link carries again, so control needs no relay.
        control = await a.paths.open(b.peer_id, CONTROL, timeout_s=5)
        assert relay.num_asked == 1
        assert not a.paths.may_be_dead(b.peer_id, standing)
        for stream in (standing, relayed, relay.theirs, better, control):
            stream.close()


async def test_whoever_did_not_answer_and_whom_nobody_relays_to_is_reached_as_before(tmp_path):
    relay = StandIn(works=False)
    async with pair(tmp_path, "libp2p", relay) as (_, a, b):
        a.paths.no_answer(b.peer_id)
        (await a.paths.open(b.peer_id, CONTROL, timeout_s=5)).close()
        assert relay.num_asked == 1 and a.paths.in_use == {b.peer_id: Path.LIBP2P}
