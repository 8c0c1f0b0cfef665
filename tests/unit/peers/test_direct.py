import asyncio
import contextlib
import os
import socket
import ssl
import time

import pytest

from peers import reception
from peers.direct import Direct
from peers.errors import PeerUnreachable, UserError
from peers.greeting import Hello
from peers.reception import MAX_PER_SOURCE, Reception
from peers.streams import StreamPool
from tests.support.keys import credentials

PROTOCOL = "test/data"


class Peer:
    """One end: a listener on loopback, and the streams that were opened to it."""

    def __init__(self, me, known, *, plain=False, allows=None):
        self.me, self.known, self.streams = me, known, asyncio.Queue()
        allows = allows or (lambda peer_id: peer_id in known)
        self.reception = Reception(me, allows=allows, plain=plain)
        self.direct = Direct(self.reception, lambda peer_id: known.get(peer_id, ()))
        self.direct.listen("/ip4/127.0.0.1/tcp/0")
        known[me.peer_id] = [f"/ip4/127.0.0.1/tcp/{self.direct.port}"]

    async def accepted(self, peer_id, stream):
        self.streams.put_nowait((peer_id, stream))

    async def next(self):
        return await asyncio.wait_for(self.streams.get(), 10)


@contextlib.asynccontextmanager
async def peers(directory, *, plain=(False, False), allows=None):
    known = {}
    made = [
        Peer(credentials(directory, name), known, plain=flag, allows=allows)
        for name, flag in zip("ab", plain, strict=True)
    ]
    for peer in made:
        await peer.direct.serve(PROTOCOL, peer.accepted)
    try:
        yield made
    finally:
        for peer in made:
            await peer.direct.close()
            peer.reception.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.mark.parametrize(
    ("plain", "is_tls"), [((False, False), True), ((True, False), True), ((True, True), False)]
)
def test_a_stream_is_plain_only_where_both_ends_say_so(tmp_path, plain, is_tls):
    async def scenario():
        async with peers(tmp_path, plain=plain) as (a, b):
            ours = await a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=10)
            caller, theirs = await b.next()
            assert caller == a.me.peer_id
            for stream in (ours, theirs):
                assert isinstance(stream, ssl.SSLSocket) == is_tls
                assert stream.gettimeout() == 0
                stream.settimeout(5)
            ours.sendall(b"across")
            assert theirs.recv(10) == b"across"
            ours.close()
            assert theirs.recv(10) == b""
            theirs.close()

    run(scenario())


@pytest.mark.parametrize("plain", [False, True])
def test_another_peer_at_the_endpoint_is_not_taken_for_the_one_called(tmp_path, plain):
    async def scenario():
        async with peers(tmp_path, plain=(plain, plain)) as (a, b):
            impostor = credentials(tmp_path, "c").peer_id
            a.known[impostor] = a.known[b.me.peer_id]
            with pytest.raises(PeerUnreachable, match="in the place of"):
                await a.direct.open(impostor, PROTOCOL, timeout_s=10)
            assert b.streams.empty()

    run(scenario())


@pytest.mark.parametrize("plain", [False, True])
def test_a_stolen_certificate_opens_nothing(tmp_path, plain):
    async def scenario():
        async with peers(tmp_path, plain=(plain, plain)) as (a, b):
            stolen = credentials(tmp_path, "a").certificate
            thief = credentials(tmp_path, "thief")
            object.__setattr__(thief, "certificate", stolen)
            a.reception.credentials = thief
            with pytest.raises(PeerUnreachable):
                await a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=10)
            assert b.streams.empty()

    run(scenario())


def test_a_stranger_and_an_unknown_protocol_are_refused(tmp_path):
    async def scenario():
        async with peers(tmp_path, allows=lambda peer_id: False) as (a, b):
            with pytest.raises(PeerUnreachable):
                await a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=10)
        async with peers(tmp_path) as (a, b):
            with pytest.raises(PeerUnreachable, match="does not serve"):
                await a.direct.open(b.me.peer_id, "test/none", timeout_s=10)

    run(scenario())


def test_garbage_and_silence_on_the_port_keep_nobody_else_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reception, "HELLO_TIMEOUT_S", 0.3)

    async def scenario():
        async with peers(tmp_path) as (a, b):
            address = ("127.0.0.1", b.direct.port)
            noise = [socket.create_connection(address, source_address=("127.0.0.2", 0)) for _ in range(40)]
            for index, sock in enumerate(noise):
                with contextlib.suppress(OSError):
                    sock.sendall(os.urandom(300) if index % 2 else b"GET / HTTP/1.1\r\n\r\n"[: index % 19])
            (await a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=10)).close()
            assert (await b.next())[0] == a.me.peer_id
            for sock in noise:
                # Every one of them is closed in time.
                sock.settimeout(5)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(sock.recv, 1) == b""
                sock.close()

    run(scenario())


def test_who_begins_greetings_and_stops_in_the_middle_is_bounded(tmp_path):
    async def scenario():
        async with peers(tmp_path) as (a, b):
            hello = Hello.of(credentials(tmp_path, "a"), plain=False).encode()
            address = ("127.0.0.1", b.direct.port)
            stuck = [socket.create_connection(address) for _ in range(3 * MAX_PER_SOURCE)]
            for sock in stuck:
                with contextlib.suppress(OSError):
                    sock.sendall(hello)
            deadline = time.monotonic() + 5
            while sum(b.reception._of.values()) < reception.MAX_PER_PEER:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            assert sum(b.reception._from.values()) <= MAX_PER_SOURCE
            assert sum(b.reception._of.values()) == reception.MAX_PER_PEER
            for sock in stuck:
                sock.close()
            await b.direct.close()
            assert not b.reception._from and not b.reception._of
            assert a.streams.empty()

    run(scenario())


def test_an_endpoint_that_nobody_listens_on_is_unreachable_and_a_port_in_use_told(tmp_path):
    async def scenario():
        async with peers(tmp_path) as (a, b):
            a.known["nobody"] = ["/ip4/127.0.0.1/tcp/1"]
            with pytest.raises(PeerUnreachable, match="Connect call failed"):
                await a.direct.open("nobody", PROTOCOL, timeout_s=5)
            with pytest.raises(PeerUnreachable, match="no endpoint known"):
                await a.direct.open("stranger", PROTOCOL, timeout_s=5)
            with pytest.raises(UserError, match="data-port"):
                a.direct.listen(b.known[b.me.peer_id][0])

    run(scenario())


def test_a_call_that_is_given_up_leaves_no_socket(tmp_path):
    async def scenario():
        me = credentials(tmp_path, "a")
        silent = socket.create_server(("127.0.0.1", 0))
        calls = Reception(me, allows=lambda _: True)
        direct = Direct(calls, lambda _: [f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"])
        opening = asyncio.create_task(direct.open("somebody", PROTOCOL, timeout_s=60))
        answered, _ = await asyncio.to_thread(silent.accept)
        answered.settimeout(5)
        while await asyncio.to_thread(answered.recv, 1 << 10) == b"":
            pass
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        while await asyncio.to_thread(answered.recv, 1 << 10):
            pass
        answered.close()
        silent.close()
        calls.close()

    run(scenario())


@pytest.mark.parametrize("plain", [False, True])
def test_the_pool_keeps_direct_streams_across_rounds(tmp_path, plain):
    async def scenario():
        async with peers(tmp_path, plain=(plain, plain)) as (a, b):
            pools = [StreamPool(peer.direct, "test/pool") for peer in (a, b)]
            for pool in pools:
                await pool.start()
            ids = {1: b.me.peer_id}, {0: a.me.peer_id}
            descriptors = set()
            for _ in range(3):
                attempt = os.urandom(16)
                streams = await asyncio.gather(
                    *(pool.connect(attempt, who, timeout_s=10) for pool, who in zip(pools, ids, strict=True))
                )
                streams[0].send[1].sendall(b"there")
                streams[1].send[0].sendall(b"back")
                for side, rank, said in ((1, 0, b"there"), (0, 1, b"back")):
                    streams[side].receive[rank].settimeout(5)
                    assert streams[side].receive[rank].recv(10) == said
                descriptors.add(streams[0].send[1].fileno())
                for pool, kept in zip(pools, streams, strict=True):
                    pool.give_back(kept)
            assert len(descriptors) == 1
            # One end closes: the other finds out before it uses the stream again.
            pools[1].drop(a.me.peer_id)
            attempt = os.urandom(16)
            streams = await asyncio.gather(
                *(pool.connect(attempt, who, timeout_s=10) for pool, who in zip(pools, ids, strict=True))
            )
            for pool, kept in zip(pools, streams, strict=True):
                pool.discard(kept)
                await pool.close()

    run(scenario())
