"""Two peers that cannot reach each other, and a third that both can."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest

from peers.errors import PeersError, PeerUnreachable
from peers.net.channel import Channel
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.relay import MAX_FORWARDED_PER_PAIR, Relay
from peers.net.paths.tls import Credentials
from tests.support.in_process import Network
from tests.support.keys import credentials
from tests.support.members import eventually
from tests.support.namespaces import hub, why_not
from tests.support.swarm import LightPeer, wait_until

PROTOCOL = "test/through"


class Member:
    def __init__(self, me: Credentials, network: Network, peers: set[str]) -> None:
        self.me, self.streams = me, asyncio.Queue[Any]()
        self.libp2p = network.transport(me.peer_id)
        self.acceptor = Acceptor(me, allows=lambda _: True)
        self.relay = Relay(
            run_id="run",
            libp2p=self.libp2p,
            acceptor=self.acceptor,
            peers=lambda: peers - {me.peer_id},
            rate_to=lambda _: 0.0,
        )

        async def accepted(peer_id: str, stream: Any) -> None:
            self.streams.put_nowait((peer_id, stream))

        self.acceptor.serve(PROTOCOL, accepted)


@contextlib.asynccontextmanager
async def members(tmp_path: Any, names: str) -> AsyncIterator[tuple[Network, dict[str, Member]]]:
    """The first and the last of them have no path between them; all know all."""
    network, ids = Network(), {name: credentials(tmp_path, name) for name in names}
    made = {name: Member(me, network, {me.peer_id for me in ids.values()}) for name, me in ids.items()}
    network.cut.add(frozenset({ids[names[0]].peer_id, ids[names[-1]].peer_id}))
    for member in made.values():
        await member.relay.start()
    try:
        yield network, made
    finally:
        await network.close()
        for member in made.values():
            await member.relay.close()


async def test_a_relayed_stream_is_encrypted_from_end_to_end_and_names_its_caller(tmp_path):
    async with members(tmp_path, "arb") as (_, m):
        ours = await m["a"].relay.open(m["b"].me.peer_id, PROTOCOL, timeout_s=20)
        caller, theirs = await asyncio.wait_for(m["b"].streams.get(), 20)
        assert caller == m["a"].me.peer_id
        assert isinstance(ours, ssl.SSLSocket) and isinstance(theirs, ssl.SSLSocket)
        payload = os.urandom(4 << 20)
        for sock in (ours, theirs):
            sock.settimeout(20)
        sender = asyncio.to_thread(ours.sendall, payload)
        received = bytearray()

        def read() -> None:
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
            await a.relay.open(b.me.peer_id, PROTOCOL, timeout_s=20) for _ in range(MAX_FORWARDED_PER_PAIR)
        ]
        with pytest.raises(PeerUnreachable, match="as much as I can"):
            await a.relay.open(b.me.peer_id, PROTOCOL, timeout_s=20)
        for stream in streams:
            stream.close()
        stranger = credentials(tmp_path, "stranger").peer_id
        with pytest.raises(PeerUnreachable, match="not both of you"):
            await a.relay.open(stranger, PROTOCOL, timeout_s=20)
        network.cut.add(frozenset({r.me.peer_id, b.me.peer_id}))
        network.opened.clear()
        with pytest.raises(PeerUnreachable, match="no connection with it"):
            await a.relay.open(b.me.peer_id, PROTOCOL, timeout_s=20)
        # It did not go on to ask anybody else.
        assert network.opened == ["diloco/run/relay"]


async def test_a_relay_that_lies_about_the_caller_gets_nothing_through(tmp_path):
    async with members(tmp_path, "arb") as (_, m):
        a, r, b = m["a"], m["r"], m["b"]
        for claimed in (a.me.peer_id, "nobody", 7):
            leg = await r.libp2p.open(b.me.peer_id, "diloco/run/relayed", timeout_s=10)
            await Channel(leg).send({"type": "deliver", "caller": claimed}, 10)
            with pytest.raises(PeersError):
                await r.acceptor.call(leg, b.me.peer_id, PROTOCOL, timeout_s=10)
        assert b.streams.empty() and not b.acceptor._of


async def test_when_a_relay_dies_its_streams_break_and_another_one_is_found(tmp_path):
    async with members(tmp_path, "arsb") as (network, m):
        a, b = m["a"], m["b"]
        first = await a.relay.open(b.me.peer_id, PROTOCOL, timeout_s=20)

        async def the_only_one() -> Member | None:
            forwarding = [m[name] for name in "rs" if m[name].relay._forwarded]
            return forwarding[0] if len(forwarding) == 1 else None

        # The other one has made an offer as well, which nobody took.
        used = await eventually(the_only_one)
        a.relay.blame(first)
        other = await a.relay.open(b.me.peer_id, PROTOCOL, timeout_s=20)
        relays = [a.relay._way_of[stream][0] for stream in (first, other)]
        assert relays[1] != relays[0] == used.me.peer_id
        other.close()
        await used.relay.close()
        first.settimeout(10)
        assert await asyncio.to_thread(first.recv, 1) == b""
        first.close()
        network.cut |= {frozenset({used.me.peer_id, other.me.peer_id}) for other in (a, b)}
        second = await a.relay.open(b.me.peer_id, PROTOCOL, timeout_s=20)
        second.close()


def test_peers_with_no_path_between_them_train_through_a_third(swarm):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05, numel=300_000)
    light.no_path = {frozenset({1, 2})}
    # What libp2p cannot reach, TCP cannot either.
    light.extra["transport"] = "libp2p"
    light.start_all(3)
    wait_until(lambda: all(num_of_all_three(peer) >= 3 for peer in light.peers.values()), "three epochs")
    light.check_digests()
    for rank, other in ((1, 2), (2, 1)):
        peer = light.peers[rank]
        assert f"data for {light.peer_id(other)} goes by relay" in peer.log
        assert f"data for {light.peer_id(0)} goes by libp2p" in peer.log


def num_of_all_three(peer: LightPeer) -> int:
    return sum(record["contributors"] == [0, 1, 2] for record in peer.epochs)


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_peers_behind_walls_train_through_a_public_one_and_outlive_its_death(swarm):
    with hub(2) as lan:
        light = swarm(local_steps=4, max_steps=100000, step_s=0.1, numel=300_000)
        light.galaxy_size = 3
        light.namespaces = {0: lan.middle, 1: lan.spokes[0], 2: lan.spokes[1]}
        light.extra = {"host_maddrs": ["/ip4/0.0.0.0/tcp/4001"], "initial_peers": []}
        public = light.start(0)
        wait_until(lambda: public.address, "the public peer's address")
        for rank, spoke in enumerate(lan.spokes, start=1):
            maddr = f"/ip4/{lan.addresses[spoke]}/tcp/4001/p2p/{light.peer_id(0)}"
            light.extra["initial_peers"] = [maddr]
            light.start(rank)
        wait_until(
            lambda: all(num_of_all_three(peer) >= 3 for peer in light.peers.values()), "three epochs", 90
        )
        light.check_digests()

        def data_goes(rank: int, other: int, path: str) -> bool:
            return f"data for {light.peer_id(other)} goes by {path}" in light.peers[rank].log

        wait_until(lambda: data_goes(1, 0, "direct") and data_goes(2, 0, "direct"), "direct streams")
        assert data_goes(1, 2, "relay") and data_goes(2, 1, "relay")
        public.kill()
        left = [light.peers[1], light.peers[2]]
        before = [peer.epoch for peer in left]
        wait_until(
            lambda: all(peer.epoch > epoch + 1 for peer, epoch in zip(left, before, strict=True)),
            "epochs without the public peer",
        )
        light.extra["initial_peers"] = []
        light.start(0)
        wait_until(
            lambda: all(peer.epochs[-1]["contributors"] == [0, 1, 2] for peer in light.peers.values()),
            "an epoch of all three again",
        )
        light.close()
