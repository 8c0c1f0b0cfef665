import asyncio
import contextlib
import os
import socket
import ssl
import threading

import pytest

from peers.errors import PeerUnreachable, UserError
from peers.net.paths import acceptor
from peers.net.paths import direct as direct_module
from peers.net.paths.acceptor import MAX_PER_PEER, MAX_PER_SOURCE, Acceptor
from peers.net.paths.direct import Direct
from peers.net.paths.greeting import Hello
from peers.net.streams import StreamPool
from tests.support.in_process import until
from tests.support.keys import credentials

PROTOCOL = "test/data"


class Peer:
    """One peer: a listener on loopback, and the streams that others opened to it."""

    def __init__(self, me, known, *, plain=False, allows=None):
        self.me, self.known, self.streams = me, known, asyncio.Queue()
        allows = allows or (lambda peer_id: peer_id in known)
        self.acceptor = Acceptor(me, allows=allows, plain=plain)
        self.direct = Direct(self.acceptor, lambda peer_id: known.get(peer_id, ()))
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


async def assert_reaches(a, b):
    (await a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=5)).close()
    caller, stream = await b.next()
    stream.close()
    assert caller == a.me.peer_id


@pytest.mark.parametrize(
    ("plain", "is_tls"), [((False, False), True), ((True, False), True), ((True, True), False)]
)
async def test_a_stream_is_plain_only_where_both_ends_say_so(tmp_path, plain, is_tls):
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


@pytest.mark.parametrize("plain", [False, True])
async def test_another_peer_at_the_endpoint_is_not_taken_for_the_one_called(tmp_path, plain):
    async with peers(tmp_path, plain=(plain, plain)) as (a, b):
        impostor = credentials(tmp_path, "c").peer_id
        a.known[impostor] = a.known[b.me.peer_id]
        with pytest.raises(PeerUnreachable, match="in place of"):
            await a.direct.open(impostor, PROTOCOL, timeout_s=10)
        assert b.streams.empty()


@pytest.mark.parametrize("plain", [False, True])
async def test_a_stolen_certificate_opens_nothing(tmp_path, plain):
    async with peers(tmp_path, plain=(plain, plain)) as (a, b):
        stolen = credentials(tmp_path, "a").certificate
        thief = credentials(tmp_path, "thief")
        object.__setattr__(thief, "certificate", stolen)
        a.acceptor.credentials = thief
        with pytest.raises(PeerUnreachable):
            await a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=10)
        assert b.streams.empty()


async def test_a_stranger_and_an_unknown_protocol_are_refused(tmp_path):
    async with peers(tmp_path, allows=lambda peer_id: False) as (a, b):
        with pytest.raises(PeerUnreachable):
            await a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=10)
    async with peers(tmp_path) as (a, b):
        with pytest.raises(PeerUnreachable, match="does not serve"):
            await a.direct.open(b.me.peer_id, "test/none", timeout_s=10)


async def test_garbage_and_silence_on_the_port_keep_nobody_else_out(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptor, "CONNECT_S", 3.0)
    async with peers(tmp_path) as (a, b):
        address = ("127.0.0.1", b.direct.port)
        noise = [socket.create_connection(address, source_address=("127.0.0.2", 0)) for _ in range(40)]
        for index, sock in enumerate(noise):
            with contextlib.suppress(OSError):
                sock.sendall(os.urandom(300) if index % 2 else b"GET / HTTP/1.1\r\n\r\n"[: index % 19])
        await assert_reaches(a, b)
        for sock in noise:
            # The acceptor closes every one of them in time.
            sock.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.to_thread(sock.recv, 1) == b""
            sock.close()


async def test_who_begins_greetings_and_stops_in_the_middle_is_bounded(tmp_path):
    async with peers(tmp_path) as (a, b):
        hello = Hello.of(credentials(tmp_path, "a"), plain=False).encode()
        address = ("127.0.0.1", b.direct.port)
        stuck = [socket.create_connection(address) for _ in range(3 * MAX_PER_SOURCE)]
        for sock in stuck:
            with contextlib.suppress(OSError):
                sock.sendall(hello)
        await until(lambda: sum(b.acceptor._of.values()) >= MAX_PER_PEER, 5.0)
        assert sum(b.acceptor._from.values()) <= MAX_PER_SOURCE
        assert sum(b.acceptor._of.values()) == MAX_PER_PEER
        for sock in stuck:
            sock.close()
        await b.direct.close()
        assert not b.acceptor._from and not b.acceptor._of
        assert a.streams.empty()


@contextlib.contextmanager
def half_greetings(port, hellos, source):
    """Connections from the address `source` that send one of `hellos` each, and then nothing."""
    with contextlib.ExitStack() as stack:
        for hello in hellos:
            sock = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
            )
            sock.sendall(hello)
        yield


async def test_who_shows_the_certificate_of_another_keeps_him_out_of_nothing(tmp_path):
    async with peers(tmp_path) as (a, b):
        hello = Hello.of(a.me, plain=False).encode()
        with half_greetings(b.direct.port, [hello] * MAX_PER_PEER, "127.0.0.2"):
            await until(lambda: sum(b.acceptor._of.values()) == MAX_PER_PEER)
            await assert_reaches(a, b)


async def test_who_begins_ever_new_greetings_is_not_answered_and_keeps_nobody_else_out(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptor, "GREETINGS_AT_ONCE", 2.0)
    monkeypatch.setattr(acceptor, "GREETINGS_PER_S", 0.0)
    async with peers(tmp_path, allows=lambda _: True) as (a, b):
        shown = [Hello.of(credentials(tmp_path, f"sybil {n}"), plain=False).encode() for n in range(3)]
        with half_greetings(b.direct.port, shown[:2], "127.0.0.2"):
            await until(lambda: sum(b.acceptor._of.values()) == 2)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", b.direct.port, local_addr=("127.0.0.2", 0)
            )
            writer.write(shown[2])
            assert await asyncio.wait_for(reader.read(1), 10) == b""
            writer.close()
            await assert_reaches(a, b)


async def test_the_silent_give_way_to_newcomers_when_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptor, "MAX_SILENT", 4)
    async with peers(tmp_path) as (a, b):
        with half_greetings(b.direct.port, [b"d"] * 8, "127.0.0.2"):
            await until(lambda: len(b.acceptor._silent) == 4)
            await assert_reaches(a, b)


@pytest.mark.parametrize("plain", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("flips", [(True, False), (False, True), (True, True)])
async def test_nobody_on_the_way_talks_two_peers_out_of_tls(tmp_path, plain, flips):
    def flipped(data):
        # The flag follows the magic of 8 bytes.
        return data[:8] + bytes([data[8] ^ 1]) + data[9:]

    num_greeted = 0

    async with peers(tmp_path, plain=plain) as (a, b):

        async def between(reader, writer):
            ahead_reader, ahead = await asyncio.open_connection("127.0.0.1", b.direct.port)

            async def copy(source, target, flip):
                nonlocal num_greeted
                data = await source.read(4096)
                target.write(flipped(data) if flip and data else data)
                num_greeted += bool(data)
                while data := await source.read(4096):
                    target.write(data)
                target.close()

            with contextlib.suppress(ConnectionError):
                await asyncio.gather(copy(reader, ahead, flips[0]), copy(ahead_reader, writer, flips[1]))

        server = await asyncio.start_server(between, "127.0.0.1", 0)
        a.known[b.me.peer_id] = [f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"]
        opening = asyncio.create_task(a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=60))
        if (plain[0] and flips[1]) or (plain[1] and flips[0]):
            # One end believes that the other agreed to plain, and waits for a request while the other begins TLS.
            await until(lambda: num_greeted == 2)
            await asyncio.wait({opening}, timeout=0.3)
            opening.cancel()
            with pytest.raises((PeerUnreachable, asyncio.CancelledError)):
                await opening
            assert b.streams.empty()
        else:
            # Otherwise no end believes that both agreed to plain, and the stream uses TLS.
            for stream in (await opening, (await b.next())[1]):
                assert isinstance(stream, ssl.SSLSocket)
                stream.close()
        server.close()


async def test_a_greeting_that_was_recorded_opens_nothing_when_it_is_played_again(tmp_path):
    async with peers(tmp_path, plain=(True, True)) as (a, b):
        recorded = bytearray()

        async def tap(reader, writer):
            ahead_reader, ahead = await asyncio.open_connection("127.0.0.1", b.direct.port)

            async def copy(source, target, kept):
                while data := await source.read(4096):
                    kept += data
                    target.write(data)
                target.close()

            await asyncio.gather(copy(reader, ahead, recorded), copy(ahead_reader, writer, bytearray()))

        server = await asyncio.start_server(tap, "127.0.0.1", 0)
        a.known[b.me.peer_id] = [f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"]
        (await a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=5)).close()
        (await b.next())[1].close()
        reader, writer = await asyncio.open_connection("127.0.0.1", b.direct.port)
        writer.write(bytes(recorded))
        answer = await asyncio.wait_for(reader.read(), 10)
        # Only its hello, without a verdict.
        assert len(answer) == len(Hello.of(b.me, plain=True).encode())
        assert b.streams.empty()
        writer.close()
        server.close()


def why_no_ipv6() -> str:
    """Why the tests of IPv6 are skipped; empty if this machine has it, at least on loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        return f"no IPv6 here: {error}"
    return ""


@pytest.mark.skipif(bool(why_no_ipv6()), reason=why_no_ipv6())
@pytest.mark.parametrize("shown", ["/ip6/::1", "/dns/localhost"])
async def test_a_peer_on_ipv6_alone_is_reached(tmp_path, shown):
    async with peers(tmp_path) as (a, b):
        six = Direct(b.acceptor, lambda _: ())
        six.listen("/ip6/::/tcp/0")
        if shown.startswith("/dns/"):
            # The name may resolve to either version.
            six.listen(f"/ip4/127.0.0.1/tcp/{six.port}")
        a.known[b.me.peer_id] = [f"{shown}/tcp/{six.port}"]
        await assert_reaches(a, b)
        await six.close()


async def test_names_that_are_looked_up_for_ever_hold_up_nobody_else(tmp_path, monkeypatch):
    # Other code in this process may look up names too.
    answer, num_asked, real = threading.Event(), 0, socket.getaddrinfo

    def slow(host, *arguments, **options):
        nonlocal num_asked
        if not str(host).endswith(".example"):
            return real(host, *arguments, **options)
        num_asked += 1
        answer.wait(30)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    try:
        async with peers(tmp_path) as (a, b):
            a.known["slow"] = [f"/dns/{name}.example/tcp/1" for name in "abcd"]
            with monkeypatch.context() as brief:
                brief.setattr(direct_module, "PROBE_S", 0.1)
                for _ in range(3):
                    with pytest.raises(PeerUnreachable):
                        await a.direct.open("slow", PROTOCOL, timeout_s=5)
            await until(lambda: num_asked == direct_module._MAX_LOOKUPS)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 5) == 7
            (await a.direct.open(b.me.peer_id, PROTOCOL, timeout_s=5)).close()
            assert num_asked == direct_module._MAX_LOOKUPS
    finally:
        answer.set()


def test_addresses_of_one_ipv6_network_count_as_one():
    of = direct_module.source_of
    assert of("2001:db8::1") == of("2001:db8::ffff:2") != of("2001:db8:0:1::1")
    assert of("fe80::1%eth0") == of("fe80::2")
    assert of("192.0.2.1") == "192.0.2.1"


async def test_an_endpoint_that_nobody_listens_on_is_unreachable_and_a_port_in_use_told(tmp_path):
    async with peers(tmp_path) as (a, b):
        a.known["nobody"] = ["/ip4/127.0.0.1/tcp/1"]
        with pytest.raises(PeerUnreachable, match="Connect call failed"):
            await a.direct.open("nobody", PROTOCOL, timeout_s=5)
        with pytest.raises(PeerUnreachable, match="no endpoint known"):
            await a.direct.open("stranger", PROTOCOL, timeout_s=5)
        with pytest.raises(UserError, match="data-port"):
            a.direct.listen(b.known[b.me.peer_id][0])


async def test_a_call_that_is_given_up_leaves_no_socket(tmp_path):
    me = credentials(tmp_path, "a")
    silent = socket.create_server(("127.0.0.1", 0))
    calls = Acceptor(me, allows=lambda _: True)
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


@pytest.mark.parametrize("plain", [False, True])
async def test_the_pool_keeps_direct_streams_across_rounds(tmp_path, plain):
    async with peers(tmp_path, plain=(plain, plain)) as (a, b):
        pools = [StreamPool(peer.direct, "test/pool") for peer in (a, b)]
        for pool in pools:
            await pool.start()
        ids = {1: b.me.peer_id}, {0: a.me.peer_id}

        async def connected():
            attempt = os.urandom(16)
            return await asyncio.gather(
                *(pool.connect(attempt, who, timeout_s=10) for pool, who in zip(pools, ids, strict=True))
            )

        descriptors = set()
        for _ in range(3):
            streams = await connected()
            streams[0].send[1].sendall(b"there")
            streams[1].send[0].sendall(b"back")
            for side, rank, said in ((1, 0, b"there"), (0, 1, b"back")):
                streams[side].receive[rank].settimeout(5)
                assert streams[side].receive[rank].recv(10) == said
            descriptors.add(streams[0].send[1].fileno())
            for pool, kept in zip(pools, streams, strict=True):
                pool.give_back(kept)
        assert len(descriptors) == 1
        # One end closes; the other notices before it uses the stream again.
        pools[1].drop(a.me.peer_id)
        streams = await connected()
        for pool, kept in zip(pools, streams, strict=True):
            pool.discard(kept)
            await pool.close()
