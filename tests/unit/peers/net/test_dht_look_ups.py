"""Hivemind's own node among nodes that answer as they like."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from peers.errors import PeerUnreachable
from peers.net.dht import look_ups
from peers.net.dht import node as dht_node
from peers.net.dht.node import Dht
from peers.net.dht.records import InitialRecords
from peers.protocol.libp2p_keys import new_private_key, peer_id_of, private_key, public_key

CHECKED, UNCHECKED = "run", "a key without a check"
VALUE = b"valid"
IN_TIME_S = 5.0


def dictionary(value, expiry, max_size=None):
    """One value under the subkey "a", as a node would send it. Hivemind reads any types."""
    return msgpack.packb(
        msgpack.ExtType(0x50, msgpack.packb([max_size, time.time(), [["a", value, expiry]]]))
    )


def found(value):
    return dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=time.time() + 20, nearest_node_ids=[]
    )


def naming(*nodes):
    """Nothing, and these neighbours."""
    return dht_pb2.FindResult(
        type=dht_pb2.NOT_FOUND,
        nearest_node_ids=[node_id.to_bytes() for node_id, _ in nodes],
        nearest_peer_ids=[peer.to_bytes() for _, peer in nodes],
    )


class Stub:
    """A node. `find` returns its answers to look-ups."""

    def __init__(self, name, find):
        self.peer, self.node_id, self._find = PeerID(name.encode()), DHTID.generate(name), find
        self.num_asked = 0

    async def rpc_find(self, request, timeout):
        self.num_asked += 1
        return dht_pb2.FindResponse(results=[self._find()], peer=self._info)

    async def rpc_store(self, request, timeout):
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=self._info)

    @property
    def _info(self):
        return dht_pb2.NodeInfo(node_id=self.node_id.to_bytes())


def honest():
    return Stub("honest", lambda: found(dictionary(msgpack.packb(VALUE), time.time() + 20)))


async def dht_among(*stubs, ask=None):
    """A Dht whose node knows these nodes; `ask(peer)` returns any others."""
    node, kept = await dht_node._create_node(SimpleNamespace(peer_id=PeerID(b"me")), [], True, IN_TIME_S)
    known = {stub.peer: stub for stub in stubs}
    node.protocol.get_stub = lambda peer: known.get(peer) or ask(peer)
    for stub in stubs:
        node.protocol.routing_table.add_or_update_node(stub.node_id, stub.peer)
    dht = object.__new__(Dht)
    dht._node, dht._kept = node, kept
    dht._initial = InitialRecords(None, node.protocol, kept, [])
    # As in an admission service: it compares before anything else.
    limit = time.time() + 40
    dht.keep(CHECKED, lambda subkey, value, *, expiry, is_found: expiry <= limit and value == VALUE)
    return dht


HOSTILE = {
    "a limit that is a text": lambda: dictionary(msgpack.packb(VALUE), time.time() + 30, "x"),
    "a limit that removes all": lambda: dictionary(msgpack.packb(VALUE), time.time() + 30, -1),
    "an expiry that is a text": lambda: dictionary(msgpack.packb(VALUE), "x"),
    "an expiry that is none": lambda: dictionary(msgpack.packb(VALUE), None),
    "an expiry that never comes": lambda: dictionary(msgpack.packb(VALUE), float("nan")),
    "no value": lambda: dictionary({"x": []}, time.time() + 30),
    "no bytes of msgpack": lambda: dictionary(b"\xc1", time.time() + 30),
    "no dictionary": lambda: msgpack.packb("x"),
}


@pytest.mark.parametrize("key", [CHECKED, UNCHECKED])
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
async def test_no_answer_of_one_node_ends_a_look_up_or_hides_what_another_has(answer, key):
    stranger = Stub("stranger", lambda: found(answer()))
    dht = await dht_among(stranger, honest())
    async with asyncio.timeout(IN_TIME_S):
        assert await dht.get(key) == {"a": VALUE}
        assert await dht.store(key, "a", VALUE, ttl_s=20)
    assert stranger.num_asked


async def test_what_a_look_up_finds_is_not_stored():
    dht = await dht_among(honest())
    storage = dht._node.protocol.storage
    key_id, expiry = DHTID.generate(source=CHECKED), time.time() + 20
    for subkey in ("own", "another"):
        assert storage.store_subkey(key_id, subkey, msgpack.packb(VALUE), expiry)
    assert await dht.get(CHECKED) == {"own": VALUE, "another": VALUE, "a": VALUE}
    assert {subkey for subkey, _ in storage.get(key_id).value.items()} == {"own", "another"}


async def test_what_was_stored_before_the_clock_was_set_back_hides_nothing(monkeypatch):
    """Every node refuses values that expire far in the future, so readers would not see this one."""
    dht = await dht_among()
    dht.keep(CHECKED, lambda subkey, value, *, expiry, is_found: True)
    now = time.time()
    for value, clock in (b"early", now + 3600), (b"first", now), (b"second", now + 3):
        monkeypatch.setattr(dht_node, "time", SimpleNamespace(time=lambda clock=clock: clock))
        await dht.store(CHECKED, "a", value, ttl_s=20)
        stored = dht._node.protocol.storage.get(DHTID.generate(source=CHECKED)).value.get("a")
        assert tuple(stored) == (msgpack.packb(value), clock + 20)


@pytest.mark.parametrize("what", ["get", "store"])
async def test_a_node_that_names_itself_under_ever_nearer_ids_is_asked_once(what):
    target = int(DHTID.generate(source=CHECKED))

    def find():
        ids = (DHTID(target ^ ((1 << 120) - 4 * stranger.num_asked - n)) for n in range(4))
        return naming(*((node_id, stranger.peer) for node_id in ids))

    stranger = Stub("stranger", find)
    dht = await dht_among(stranger)
    async with asyncio.timeout(IN_TIME_S):
        await (dht.get(CHECKED) if what == "get" else dht.store(CHECKED, "a", VALUE, ttl_s=20))
    assert stranger.num_asked == 1
    assert stranger.peer not in dht._node.blacklist, "any node may have named another one twice"


async def test_a_look_up_among_ever_more_nodes_ends_with_what_the_others_have(monkeypatch):
    target, num_made = int(DHTID.generate(source=CHECKED)), 0
    # Each answer takes a second.
    monkeypatch.setattr(look_ups, "time", SimpleNamespace(monotonic=lambda: float(num_made)))

    def find():
        nonlocal num_made
        num_made += 1
        return naming((DHTID(target ^ ((1 << 120) - num_made)), PeerID(b"sybil %d" % num_made)))

    dht = await dht_among(Stub("stranger", find), honest(), ask=lambda peer: Stub("sybil", find))
    async with asyncio.timeout(IN_TIME_S):
        assert await dht.get(CHECKED) == {"a": VALUE}
    assert 3 < num_made < 10
    async with asyncio.timeout(IN_TIME_S):
        await dht.store(CHECKED, "a", VALUE, ttl_s=20)


async def fails(*_, **__):
    raise AssertionError("of Hivemind")


async def hangs(*_, **__):
    await asyncio.Future()


@pytest.mark.parametrize("call", [fails, hangs])
async def test_a_look_up_that_fails_or_hangs_is_no_answer(monkeypatch, call):
    monkeypatch.setattr(dht_node, "_DEADLINE_S", 0.0)
    dht = await dht_among()
    dht._node = SimpleNamespace(get=call, store=call, protocol=SimpleNamespace(call_ping=call))
    dht._initial = SimpleNamespace(find=call, store=call)
    async with asyncio.timeout(IN_TIME_S):
        assert await dht.get(CHECKED) == {}
        assert not await dht.store(CHECKED, "a", VALUE, ttl_s=20)
        assert not await dht.ping(str(PeerID(b"any")), timeout_s=IN_TIME_S)


async def test_an_initial_peer_whose_dht_id_is_none_is_a_wrong_address(monkeypatch):
    class Longer:
        async def rpc_ping(self, request, timeout):
            return dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=b"\xff" * 21), dht_time=time.time())

    monkeypatch.setattr(DHTProtocol, "get_stub", lambda _self, _peer: Longer())
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(public_key(private_key(new_private_key())))}"
    with pytest.raises(PeerUnreachable, match="no Hivemind DHT answers there"):
        await dht_node._create_node(SimpleNamespace(peer_id=PeerID(b"me")), [address], True, IN_TIME_S)
