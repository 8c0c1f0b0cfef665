"""Relays that lie, hang or give out, and callers that want more than their share: libp2p is in this process."""

import asyncio
import contextlib
import socket
from functools import partial
from pathlib import Path

import pytest
from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable
from peers.net import offers
from peers.net.channel import Channel
from peers.net.paths import relay as relay_module
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.forwarding import Forwarder
from peers.net.paths.relay import Relay
from peers.protocol.relays import Go, Offer, Ready, Want, asking, delivering
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
            libp2p=self.libp2p,
            acceptor=self.acceptor,
            peers=lambda: peers - {me.peer_id},
            rate_to=lambda peer_id: self.rates.get(peer_id, 0.0),
        )
        self.acceptor.serve(PROTOCOL, self.accepted)

    async def accepted(self, peer_id, stream):
        self.streams.put_nowait((peer_id, stream))


@contextlib.asynccontextmanager
async def members(directory, names):
    """The first and the last have no path between them; all know all."""
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
    """A relay that offers the most, says that it is ready to who takes its offer, and forwards nothing."""
    channel = Channel(sock)
    await channel.read(Decoder(Want), 5)
    await channel.send(Offer(rate=1e12, load=0))
    await channel.read(Decoder(Go), 5)
    taken_by.append(peer_id)
    await channel.send(Ready())
    await asyncio.sleep(60)


async def relay_between(member, other, timeout_s=10.0):
    """Through whom a stream goes."""
    stream = await member.relay.open(other.peer_id, PROTOCOL, timeout_s=timeout_s)
    relay, _ = member.relay._way_of[stream]
    stream.close()
    return relay


async def test_a_relay_that_does_not_answer_holds_up_no_offer_of_another(tmp_path, monkeypatch):
    async with members(tmp_path, "ahrb") as (network, m):
        network.handlers[m["h"].peer_id, asking("run")] = hang
        with monkeypatch.context() as patient:
            # Who waited for its answer would have no time left.
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
        # Both legs of the honest one are slow.
        m["a"].rates[m["r"].peer_id] = m["r"].rates[m["b"].peer_id] = 1e3
        assert await relay_between(m["a"], m["b"], timeout_s=6.0) == m["r"].peer_id
        assert await relay_between(m["a"], m["b"], timeout_s=6.0) == m["r"].peer_id
        assert promised == [m["a"].peer_id]


async def test_a_peer_that_takes_no_relayed_stream_spoils_no_relays_name_with_others(tmp_path):
    async with members(tmp_path, "arxb") as (network, m):
        network.handlers[m["x"].peer_id, delivering("run")] = hang
        network.cut.add(frozenset({m["a"].peer_id, m["x"].peer_id}))
        with pytest.raises(PeerUnreachable, match="offers what it does not do"):
            await m["a"].relay.open(m["x"].peer_id, PROTOCOL, timeout_s=4.0)
        assert m["a"].relay._is_blamed(m["r"].peer_id, m["x"].peer_id)
        assert not m["a"].relay._is_blamed(m["r"].peer_id, m["b"].peer_id)


async def test_offers_that_are_not_taken_are_turned_down_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(offers, "GRACE_S", 5.0)
    async with members(tmp_path, "arsb") as (_, m):
        stream = await m["a"].relay.open(m["b"].peer_id, PROTOCOL, timeout_s=10)
        await until(lambda: sum(m[name].relay._forwarded.total() for name in "rs") <= 1, 2.0)
        opening = asyncio.create_task(m["a"].relay.open(m["b"].peer_id, PROTOCOL, timeout_s=10))
        await asyncio.sleep(0.01)
        opening.cancel()
        stream.close()
        await asyncio.wait({opening})
        if not opening.cancelled():
            opening.result().close()
        await until(lambda: not any(m[name].relay._forwarded for name in "rs"))


def num_sockets():
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        # That of the listing itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            found += str(descriptor.readlink()).startswith("socket")
    return found


async def test_an_opening_that_is_cancelled_wherever_it_is_leaves_no_socket(tmp_path):
    async with members(tmp_path, "arsb") as (_, m):
        a, b = m["a"], m["b"]
        # Both relays have their thread from now on.
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


def test_a_forwarder_that_is_closed_begins_nothing_and_takes_nothing_over():
    forwarder = Forwarder()
    forwarder.close()
    one, other = socket.socketpair()
    with pytest.raises(PeerUnreachable):
        forwarder.forward(one, other, lambda: None)
    assert forwarder._thread is None and one.fileno() >= 0
    one.close()
    other.close()
