from __future__ import annotations

import time
from types import SimpleNamespace

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.utils.timed_storage import ValueWithExpiration
from hypothesis import given
from hypothesis import strategies as st

from peers.net.dht import records as dht_records
from peers.net.dht.records import MAX_OTHER_AT_ONCE, MAX_OTHER_BYTES, MAX_OTHER_TTL_S, KeptRecords


def record(key: str, subkey: object, value: object, ttl_s: float = 20.0) -> DHTRecord:
    packed = DHTID.generate(source=key).to_bytes(), msgpack.packb(subkey), msgpack.packb(value)
    return DHTRecord(*packed, time.time() + ttl_s)


def kept() -> KeptRecords:
    records = KeptRecords()
    records.keep("run", lambda subkey, value, *, expiry, is_found: value == b"of " + subkey.encode())
    return records


def test_under_a_known_key_only_what_passes_its_check_is_kept():
    records = kept()
    assert records.validate(record("run", "a", b"of a"))
    for subkey, value in (("a", b"of b"), (None, b"of None"), (b"a", b"of a"), ("a", "of a"), ("a", None)):
        assert not records.validate(record("run", subkey, value))
    assert not records.validate(DHTRecord(DHTID.generate(source="run").to_bytes(), b"", b"\xa1a", 0.0))


@given(subkey=st.binary(max_size=50), value=st.binary(max_size=50))
def test_random_bytes_under_a_known_key_are_not_kept(subkey, value):
    assert not kept().validate(DHTRecord(DHTID.generate(source="run").to_bytes(), subkey, value, 0.0))


def test_under_other_keys_little_is_kept_and_not_for_long(monkeypatch):
    monkeypatch.setattr(dht_records, "MAX_OTHER_PER_S", 0.0)
    records = kept()
    assert not records.validate(record("other", "a", b"x" * MAX_OTHER_BYTES))
    assert not records.validate(record("other", "a", b"x", MAX_OTHER_TTL_S + 10))
    taken = sum(records.validate(record(f"other {n}", "a", b"x")) for n in range(2 * MAX_OTHER_AT_ONCE))
    assert taken == MAX_OTHER_AT_ONCE
    assert records.validate(record("run", "a", b"of a"))


async def found_at_another_node(value, records=None):
    """What `records` let through when another node returns `value` for the known key."""
    key = DHTID.generate(source="run")
    protocol = SimpleNamespace(call_find=None)

    async def call_find(peer, keys):
        return {key: (ValueWithExpiration(value, time.time() + 90), {"nearest": "nodes"}) for key in keys}

    protocol.call_find = call_find
    (records or kept()).guard(protocol)
    answer = await protocol.call_find("peer", [key])
    return answer and answer[key]


async def test_of_what_another_node_returns_each_false_value_is_dropped_alone():
    values, soon, later = DictionaryDHTValue(), time.time() + 60, time.time() + 90
    values.store("a", msgpack.packb(b"of a"), soon)
    values.store("b", msgpack.packb(b"of a"), later)
    values.store("c", b"\xff", later)
    found, nearest = await found_at_another_node(values)
    assert nearest == {"nearest": "nodes"}
    assert {subkey: tuple(item) for subkey, item in found.value.items()} == {
        "a": (msgpack.packb(b"of a"), soon)
    }
    assert found.expiration_time == soon


async def test_a_value_without_subkeys_does_not_replace_those_with_them():
    assert await found_at_another_node(msgpack.packb(b"of a")) == (None, {"nearest": "nodes"})


async def test_an_answer_that_cannot_be_checked_is_none():
    def check(subkey, value, *, expiry, is_found):
        raise TypeError("what has this node sent?")

    values, records = DictionaryDHTValue(), KeptRecords()
    values.store("a", msgpack.packb(b"of a"), time.time() + 60)
    records.keep("run", check)
    assert await found_at_another_node(values, records) is None
