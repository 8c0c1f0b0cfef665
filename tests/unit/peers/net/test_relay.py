"""Streams through a third peer; relays that lie, hang or die; callers that want more than their share.

The transport below, libp2p in the product, is a Network in this process.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from functools import partial
from pathlib import Path

import pytest
from msgspec.msgpack import Decoder

from peers.errors import PeersError, PeerUnreachable
from peers.net import offers
from peers.net.channel import Channel
from peers.net.overlay import Ring
from peers.net.paths import relay as relay_module
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.forwarding import Forwarder
from peers.net.paths.relay import (
    MAX_FORWARDED,
    MAX_FORWARDED_PER_CALLER,
    MAX_FORWARDED_PER_PAIR,
    Relay,
)
from peers.protocol.aggregation import RULES
from peers.protocol.relays import Go, Offer, Ready, Want, asking, delivering
from peers.reduce.shares import likely_neighbours
from peers.timing import FULL_MESH
from tests.support.in_process import Network, until
from tests.support.keys import credentials

PROTOCOL = "test/through"


class Member:
    def __init__(self, me, network, peers):
        self.peer_id, self.streams = me.peer_id, asyncio.Queue()
        self.libp2p = network.transport(me.peer_id)
        self.acceptor = Acceptor(me, allows=lambda _: True)
        self.rates = {}
        self.relay = Relay(
            run_id="run",
            peer_id=me.peer_id,
            libp2p=self.libp2p,
            acceptor=self.acceptor,
            peers=lambda: dict.fromkeys(peers - {me.peer_id}, ()),
            rate_to=lambda peer_id: self.rates.get(peer_id, 0.0),
        )
        self.acceptor.serve(PROTOCOL, self.accepted)

    async def accepted(self, peer_id, stream):
        self.streams.put_nowait((peer_id, stream))


@contextlib.asynccontextmanager
async def members(directory, names):
    """Members that all know each other; only the first and the last have no path between them."""
    network, made = Network(), {}
    ids = {name: credentials(directory, name) for name in names}
    peers = {me.peer_id for me in ids.values()}
    for name, me in ids.items():
        made[name] = Member(me, network, peers)
        await made[name].relay.start()
    network.cut.add(frozenset({ids[names[0]].peer_id, ids[names[-1]].peer_id}))
    try:
        yield network, made
    finally:
        await network.close()
        for member in made.values():
            await member.relay.close()


async def hang(_peer_id, sock):
    with sock:
        await asyncio.sleep(60)


async def promise(taken_by, peer_id, sock):
    """A relay that makes the best offer, says that it is ready to the peer that takes it, and forwards nothing."""
    channel = Channel(sock)
    await channel.read(Decoder(Want), 5)
    await channel.send(Offer(rate=1e12, load=0))
    await channel.read(Decoder(Go), 5)
    taken_by.append(peer_id)
    await channel.send(Ready())
    await asyncio.sleep(60)


async def relay_between(member, other, timeout_s=10.0):
    """Open a stream to `other`. Returns the relay that it goes through."""
    stream = await member.relay.open(other.peer_id, PROTOCOL, timeout_s=timeout_s)
    relay, _ = member.relay._way_of[stream]
    stream.close()
    return relay


async def test_a_relayed_stream_is_encrypted_from_end_to_end_and_names_its_caller(tmp_path):
    async with members(tmp_path, "arb") as (_, m):
        ours = await m["a"].relay.open(m["b"].peer_id, PROTOCOL, timeout_s=20)
        caller, theirs = await asyncio.wait_for(m["b"].streams.get(), 20)
        assert caller == m["a"].peer_id
        assert isinstance(ours, ssl.SSLSocket) and isinstance(theirs, ssl.SSLSocket)
        payload = os.urandom(4 << 20)
        for sock in (ours, theirs):
            sock.settimeout(20)
        sender = asyncio.to_thread(ours.sendall, payload)
        received = bytearray()

        def read():
            while len(received) < len(payload):
                received.extend(theirs.recv(1 << 16))

        await asyncio.gather(sender, asyncio.to_thread(read))
        assert received == payload
        ours.close()
        assert await asyncio.to_thread(theirs.recv, 1) == b""
        theirs.close()


async def test_a_relay_forwards_only_so_much_and_only_to_whom_it_reaches_itself(tmp_path):
    async with members(tmp_path, "arb") as (network, m):
        a, r, b = m["a"], m["r"], m["b"]
        streams = [
            await a.relay.open(b.peer_id, PROTOCOL, timeout_s=20) for _ in range(MAX_FORWARDED_PER_PAIR)
        ]
        with pytest.raises(PeerUnreachable, match="as much as I can"):
            await a.relay.open(b.peer_id, PROTOCOL, timeout_s=20)
        for stream in streams:
            stream.close()
        stranger = credentials(tmp_path, "stranger").peer_id
        with pytest.raises(PeerUnreachable, match="do not know both of you"):
            await a.relay.open(stranger, PROTOCOL, timeout_s=20)
        network.cut.add(frozenset({r.peer_id, b.peer_id}))
        network.opened.clear()
        with pytest.raises(PeerUnreachable, match="no connection with it"):
            await a.relay.open(b.peer_id, PROTOCOL, timeout_s=20)
        # The relay did not ask anybody else.
        assert network.opened == ["diloco/run/relay"]


async def test_a_relay_that_lies_about_the_caller_gets_nothing_through(tmp_path):
    async with members(tmp_path, "arb") as (_, m):
        a, r, b = m["a"], m["r"], m["b"]
        for claimed in (a.peer_id, "nobody", 7):
            leg = await r.libp2p.open(b.peer_id, "diloco/run/relayed", timeout_s=10)
            await Channel(leg).send({"type": "deliver", "caller": claimed}, 10)
            with pytest.raises(PeersError):
                await r.acceptor.call(leg, b.peer_id, PROTOCOL, timeout_s=10)
        assert b.streams.empty() and not b.acceptor._of


async def test_when_a_relay_dies_its_streams_break_and_another_one_is_found(tmp_path):
    async with members(tmp_path, "arsb") as (network, m):
        a, b = m["a"], m["b"]
        first = await a.relay.open(b.peer_id, PROTOCOL, timeout_s=20)

        def forwarding():
            return [m[name] for name in "rs" if m[name].relay._forwarded]

        # The other relay has made an offer too, which is withdrawn because nobody took it.
        await until(lambda: len(forwarding()) == 1)
        (used,) = forwarding()
        a.relay.blame(first)
        other = await a.relay.open(b.peer_id, PROTOCOL, timeout_s=20)
        relays = [a.relay._way_of[stream][0] for stream in (first, other)]
        assert relays[1] != relays[0] == used.peer_id
        other.close()
        await used.relay.close()
        first.settimeout(10)
        assert await asyncio.to_thread(first.recv, 1) == b""
        first.close()
        network.cut |= {frozenset({used.peer_id, other.peer_id}) for other in (a, b)}
        second = await a.relay.open(b.peer_id, PROTOCOL, timeout_s=20)
        second.close()


async def test_a_relay_that_does_not_answer_holds_up_no_offer_of_another(tmp_path, monkeypatch):
    async with members(tmp_path, "ahrb") as (network, m):
        network.handlers[m["h"].peer_id, asking("run")] = hang
        with monkeypatch.context() as patient:
            # Waiting for the answer of `h` would use up the time of the whole call.
            for module in (offers, relay_module):
                patient.setattr(module, "PROBE_S", 60.0)
            assert await relay_between(m["a"], m["b"]) == m["r"].peer_id
        network.handlers[m["r"].peer_id, asking("run")] = hang
        with pytest.raises(PeerUnreachable, match="no message within"):
            await m["a"].relay.open(m["b"].peer_id, PROTOCOL, timeout_s=10)


async def test_a_relay_that_promises_and_does_nothing_leaves_time_for_another_and_comes_last_then(tmp_path):
    async with members(tmp_path, "ahrb") as (network, m):
        promised = []
        network.handlers[m["h"].peer_id, asking("run")] = partial(promise, promised)
        # Both legs through the honest relay `r` are slow.
        m["a"].rates[m["r"].peer_id] = m["r"].rates[m["b"].peer_id] = 1e3
        assert await relay_between(m["a"], m["b"], timeout_s=6.0) == m["r"].peer_id
        assert await relay_between(m["a"], m["b"], timeout_s=6.0) == m["r"].peer_id
        assert promised == [m["a"].peer_id]


async def test_a_peer_that_takes_no_relayed_stream_spoils_no_relays_name_with_others(tmp_path):
    async with members(tmp_path, "arxb") as (network, m):
        network.handlers[m["x"].peer_id, delivering("run")] = hang
        network.cut.add(frozenset({m["a"].peer_id, m["x"].peer_id}))
        with pytest.raises(PeerUnreachable, match="it offered to relay, but did not"):
            await m["a"].relay.open(m["x"].peer_id, PROTOCOL, timeout_s=4.0)
        assert m["a"].relay._is_blamed(m["r"].peer_id, m["x"].peer_id)
        assert not m["a"].relay._is_blamed(m["r"].peer_id, m["b"].peer_id)


@pytest.mark.parametrize("num_dialled", [16, 1, 0])
async def test_among_many_peers_those_that_keep_channels_with_the_called_one_are_asked(
    tmp_path, monkeypatch, num_dialled
):
    monkeypatch.setattr(offers, "GRACE_S", 0.01)
    async with members(tmp_path, [f"{number}" for number in range(40)]) as (network, m):
        a, b = m["0"], m["39"]
        ids = {member.peer_id for member in m.values()} - {a.peer_id, b.peer_id}
        near = sorted(ids & Ring({*ids, a.peer_id, b.peer_id}).neighbours_of(b.peer_id))
        relays = near[-max(1, num_dialled) :]
        network.cut |= {frozenset({b.peer_id, other}) for other in ids - set(relays)}
        # Those that have no connection with `b` have the fastest links.
        a.rates = {other: 1e3 if other in relays else 1e9 for other in ids}
        if not num_dialled:
            # Nor has `a` one with the only relay: it has to dial it.
            usual = a.libp2p.connected_peers

            async def connected_peers():
                return await usual() - set(relays)

            a.libp2p.connected_peers = connected_peers
        assert await relay_between(a, b) in relays


async def test_who_has_dialled_one_peer_alone_is_reached_through_it_though_it_is_no_neighbour(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(offers, "GRACE_S", 0.01)
    async with members(tmp_path, [f"{number}" for number in range(40)]) as (network, m):
        a, b = m["0"], m["39"]
        ids = {member.peer_id for member in m.values()} - {a.peer_id, b.peer_id}
        hub = min(ids - Ring({*ids, a.peer_id, b.peer_id}).neighbours_of(b.peer_id))
        network.slow |= {frozenset({one.peer_id, other}) for one in (a, b) for other in ids - {hub}}
        assert await relay_between(a, b, timeout_s=2.0) == hub


async def test_openings_that_wait_for_one_relay_hold_up_none_through_another(tmp_path, monkeypatch):
    monkeypatch.setattr(offers, "GRACE_S", 0.01)
    for module in (offers, relay_module):
        monkeypatch.setattr(module, "PROBE_S", 60.0)
    asked = []

    async def hang_on(peer_id, sock):
        asked.append(peer_id)
        await hang(peer_id, sock)

    async with members(tmp_path, "ahrxb") as (network, m):
        a, x = m["a"], m["x"]
        network.cut |= {frozenset({one.peer_id, x.peer_id}) for one in (a, m["r"])}
        network.handlers[m["h"].peer_id, asking("run")] = hang_on
        waiting = [asyncio.create_task(relay_between(a, x, timeout_s=60.0)) for _ in range(8)]
        await until(lambda: len(asked) == relay_module._MAX_OPENING)
        assert await relay_between(a, m["b"], timeout_s=10.0) == m["r"].peer_id
        assert len(asked) == relay_module._MAX_OPENING
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_offers_that_are_not_taken_are_turned_down_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(offers, "GRACE_S", 5.0)
    for module in (offers, relay_module):
        # Otherwise an offer that nobody turns down would expire during the test.
        monkeypatch.setattr(module, "PROBE_S", 60.0)
    async with members(tmp_path, "arsb") as (_, m):
        stream = await m["a"].relay.open(m["b"].peer_id, PROTOCOL, timeout_s=10)
        await until(lambda: sum(m[name].relay._forwarded.total() for name in "rs") <= 1)
        opening = asyncio.create_task(m["a"].relay.open(m["b"].peer_id, PROTOCOL, timeout_s=10))
        await asyncio.sleep(0.01)
        opening.cancel()
        stream.close()
        await asyncio.wait({opening})
        if not opening.cancelled():
            opening.result().close()
        await until(lambda: not any(m[name].relay._forwarded for name in "rs"))


def num_sockets():
    """Counts the ends of socket pairs, which streams are here; other code in this process opens other sockets."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    unnamed = {f"socket:[{words[6]}]" for words in lines if len(words) == 7}
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        # The descriptor of the directory listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found += str(descriptor.readlink()) in unnamed
    return found


async def test_an_opening_that_is_cancelled_wherever_it_is_leaves_no_socket(tmp_path):
    async with members(tmp_path, "arsb") as (_, m):
        a, b = m["a"], m["b"]
        # Use both relays once, so that each has started its thread.
        for _ in range(2):
            stream = await a.relay.open(b.peer_id, PROTOCOL, timeout_s=10)
            a.relay.blame(stream)
            stream.close()
            (await asyncio.wait_for(b.streams.get(), 10))[1].close()
        await until(lambda: not any(m[name].relay._forwarded for name in "rs"))
        before = num_sockets()
        for num_turns in range(40):
            opening = asyncio.create_task(a.relay.open(b.peer_id, PROTOCOL, timeout_s=10))
            for _ in range(num_turns):
                await asyncio.sleep(0.0005)
            opening.cancel()
            (outcome,) = await asyncio.gather(opening, return_exceptions=True)
            if isinstance(outcome, socket.socket):
                outcome.close()
            await until(lambda: not any(m[name].relay._forwarded for name in "rs"))

        def is_as_before():
            while not b.streams.empty():
                b.streams.get_nowait()[1].close()
            return num_sockets() <= before

        await until(is_as_before)


async def test_one_caller_takes_no_more_than_its_share_of_a_relay(tmp_path, monkeypatch):
    monkeypatch.setattr(relay_module, "MAX_FORWARDED", 4)
    monkeypatch.setattr(relay_module, "MAX_FORWARDED_PER_CALLER", 2)
    async with members(tmp_path, "arb") as (_, m):
        a, b = m["a"], m["b"]
        taken = [await a.relay.open(b.peer_id, PROTOCOL, timeout_s=5) for _ in range(2)]
        with pytest.raises(PeerUnreachable, match="as much as I can"):
            await a.relay.open(b.peer_id, PROTOCOL, timeout_s=5)
        taken.append(await b.relay.open(a.peer_id, PROTOCOL, timeout_s=5))
        for stream in taken:
            stream.close()


@pytest.mark.parametrize("rule", RULES)
def test_one_reachable_peer_can_connect_all_others_of_a_full_mesh(rule):
    for count in range(2, FULL_MESH):
        bandwidths = {f"hidden {number}": 1e6 for number in range(count)}
        data = [len(likely_neighbours(peer, bandwidths, rule)) for peer in bandwidths]
        assert count * (count - 1) // 2 + sum(data) <= MAX_FORWARDED
        # A caller with the greatest id opens the channels with all others.
        assert count - 1 + max(data) <= MAX_FORWARDED_PER_CALLER


async def test_a_relay_leaves_half_of_its_descriptors_for_all_else(tmp_path, monkeypatch):
    monkeypatch.setattr(relay_module, "raise_limit", lambda: 4)
    async with members(tmp_path, "arb") as (_, m):
        a, b = m["a"], m["b"]
        stream = await a.relay.open(b.peer_id, PROTOCOL, timeout_s=5)
        with pytest.raises(PeerUnreachable, match="as much as I can"):
            await b.relay.open(a.peer_id, PROTOCOL, timeout_s=5)
        stream.close()


def test_a_forwarder_that_is_closed_begins_nothing_and_takes_nothing_over():
    forwarder = Forwarder()
    forwarder.close()
    one, other = socket.socketpair()
    with pytest.raises(PeerUnreachable):
        forwarder.forward(one, other, lambda: None)
    assert forwarder._thread is None and one.fileno() >= 0
    one.close()
    other.close()
