from __future__ import annotations

import math

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from peers.admission.secrets import AdmissionKey
from peers.errors import ProtocolError
from peers.net import gate
from peers.net.gate import Gate
from peers.protocol import libp2p_keys, tokens
from peers.protocol.limits import MAX_BANS_BYTES
from peers.protocol.refusal import Refused, Why
from peers.protocol.tokens import MAX_BANNED, BanList, Token, banned_more
from peers.protocol.wire import encode

NOW = 1_800_000_000.0
KEY, OTHER_KEY = AdmissionKey.new(), AdmissionKey.new()
PUBLIC = KEY.secret.public_key


def new_peer_id() -> str:
    key = libp2p_keys.private_key(libp2p_keys.new_private_key())
    return libp2p_keys.peer_id_of(libp2p_keys.public_key(key))


PEER, OTHER, DOOR = new_peer_id(), new_peer_id(), "mesh"
TOKEN = Token(run_id="run", peer_id=PEER, not_before=NOW, expires=NOW + 100)
JSON = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


def gate_at(now: float = NOW) -> Gate:
    return Gate("run", PUBLIC, clock=lambda: now)


def why_refused(decision: Gate, blob: bytes, peer_id: str = PEER) -> Why | None:
    try:
        decision.check(peer_id, blob, DOOR)
    except Refused as error:
        return error.why
    return None


def bans(version: int, *peer_ids: str, key: AdmissionKey = KEY, run_id: str = "run") -> bytes:
    listed = BanList(run_id=run_id, version=version, peer_ids=frozenset(peer_ids))
    return listed.encode(key.private_key)


def test_a_token_and_a_ban_list_arrive_as_they_were_signed():
    assert Token.decode(TOKEN.encode(KEY.private_key), PUBLIC) == TOKEN
    listed = BanList(run_id="run", version=3, peer_ids=frozenset({PEER, OTHER}))
    assert BanList.decode(listed.encode(KEY.private_key), PUBLIC) == listed


@pytest.mark.parametrize(
    ("changes", "key", "shown_by", "now", "why"),
    [
        ({}, KEY, PEER, NOW, None),
        ({}, KEY, PEER, NOW + 99, None),
        ({}, KEY, PEER, NOW + 100, Why.EXPIRED),
        ({}, KEY, PEER, NOW - 9, None),
        ({}, KEY, PEER, NOW - 11, Why.EARLY),
        ({}, KEY, OTHER, NOW, Why.ANOTHERS),
        ({}, OTHER_KEY, PEER, NOW, Why.FORGED),
        ({"run_id": "another"}, KEY, PEER, NOW, Why.FORGED),
    ],
    # Peer ids differ in every test run, so they must not be part of the test ids.
    ids=range(8),
)
def test_a_token_opens_doors_for_its_holder_in_its_run_in_its_time(changes, key, shown_by, now, why):
    blob = replace(TOKEN, **changes).encode(key.private_key)
    assert why_refused(gate_at(now), blob, shown_by) is why


def test_without_an_admission_key_everybody_is_let_in():
    decision = Gate("run")
    assert decision.is_open and why_refused(decision, b"") is None
    decision.check_shown(PEER, DOOR)
    assert not decision.learn(bans(1, PEER)) and why_refused(decision, b"") is None


def test_who_has_shown_a_token_is_known_until_it_expires_or_he_is_banned():
    now = NOW
    decision, blob = Gate("run", PUBLIC, clock=lambda: now), TOKEN.encode(KEY.private_key)
    with pytest.raises(Refused, match="shown no token"):
        decision.check_shown(PEER, DOOR)
    decision.check(PEER, blob, DOOR)
    now = NOW + 99
    decision.check_shown(PEER, DOOR)
    now = NOW + 101
    with pytest.raises(Refused, match="expired"):
        decision.check_shown(PEER, DOOR)
    now = NOW
    assert decision.learn(bans(1, PEER))
    for refused in (lambda: decision.check_shown(PEER, DOOR), lambda: decision.check(PEER, blob, DOOR)):
        with pytest.raises(Refused, match="banned"):
            refused()
    assert decision.learn(bans(2))
    decision.check_shown(PEER, DOOR)


def test_no_number_of_tokens_takes_more_memory_than_is_given_to_them(monkeypatch):
    monkeypatch.setattr(gate, "MAX_SHOWN", 3)
    decision = gate_at()
    peer_ids = [new_peer_id() for _ in range(5)]
    for peer_id in peer_ids:
        decision.check(peer_id, replace(TOKEN, peer_id=peer_id).encode(KEY.private_key), DOOR)
    assert [why_refused(decision, b"", peer_id) for peer_id in peer_ids] == [Why.NO_TOKEN] * 5
    with pytest.raises(Refused):
        decision.check_shown(peer_ids[0], DOOR)
    decision.check_shown(peer_ids[-1], DOOR)


def test_of_two_ban_lists_the_higher_version_holds_whatever_the_order():
    lists = [bans(1, PEER), bans(2, OTHER), bans(2, PEER, OTHER), bans(3)]
    for order in (lists, lists[::-1], [lists[2], lists[1], lists[0]], [lists[1], lists[2]]):
        decision = gate_at()
        for blob in order:
            decision.learn(blob)
        newest = max(order, key=lambda blob: BanList.decode(blob, PUBLIC).order)
        assert decision.bans_blob == newest
        assert not decision.learn(newest)


def test_the_same_ban_list_in_another_encoding_is_not_a_newer_one():
    decision, blob = gate_at(), bans(1, PEER)
    envelope = msgspec.msgpack.decode(blob)
    again = encode(dict(reversed(envelope.items())))
    assert again != blob and BanList.decode(again, PUBLIC) == BanList.decode(blob, PUBLIC)
    assert [decision.learn(blob), decision.learn(again), decision.learn(blob)] == [True, False, False]


@pytest.mark.parametrize(
    "blob", [bans(9, PEER, key=OTHER_KEY), bans(9, PEER, run_id="another"), b"\0", b"\xc1"]
)
def test_a_ban_list_of_another_run_or_key_is_no_ban_list(blob):
    decision = gate_at()
    with pytest.raises(ProtocolError):
        decision.learn(blob)
    assert decision.bans.version == 0


def test_a_full_ban_list_fits_into_a_message_and_no_more_is_signed():
    listed = BanList(run_id="r" * 64, version=9)
    full = banned_more(listed, ban=[new_peer_id() for _ in range(MAX_BANNED)])
    assert len(full.encode(KEY.private_key)) <= MAX_BANS_BYTES
    with pytest.raises(ValueError, match="at most"):
        banned_more(full, ban=[PEER]).encode(KEY.private_key)


def test_bans_are_added_and_lifted_in_new_versions():
    once = banned_more(BanList(run_id="run"), ban=[PEER, OTHER])
    assert (once.version, once.peer_ids) == (1, {PEER, OTHER})
    lifted = banned_more(once, unban=[PEER])
    assert (lifted.version, lifted.peer_ids) == (2, {OTHER})


@pytest.mark.parametrize("blob", [TOKEN.encode(KEY.private_key), bans(1, PEER)])
def test_one_flipped_bit_or_missing_byte_anywhere_is_noticed(blob):
    flipped = [blob[:i] + bytes([blob[i] ^ 1]) + blob[i + 1 :] for i in range(len(blob))]
    for wrong in (*flipped, *(blob[:i] for i in range(len(blob))), blob + b"\0"):
        with pytest.raises(ProtocolError):
            Token.decode(wrong, PUBLIC)
        with pytest.raises(ProtocolError):
            BanList.decode(wrong, PUBLIC)


def test_neither_signature_is_taken_for_the_other():
    with pytest.raises(Refused):
        Token.decode(bans(1, PEER), PUBLIC)
    with pytest.raises(ProtocolError):
        BanList.decode(TOKEN.encode(KEY.private_key), PUBLIC)


@given(blob=st.binary(max_size=300) | st.binary(min_size=5000, max_size=5001) | JSON.map(msgpack.packb))
def test_random_bytes_are_a_protocol_error(blob):
    for decode in (Token.decode, BanList.decode):
        with pytest.raises(ProtocolError):
            decode(blob, PUBLIC)


@given(value=JSON, kind=st.sampled_from([tokens._TOKEN, tokens._BANS]))
def test_signed_nonsense_is_a_protocol_error(value, kind):
    blob = tokens._signed(kind, encode(value), KEY.private_key)
    for decode in (Token.decode, BanList.decode):
        with pytest.raises(ProtocolError):
            decode(blob, PUBLIC)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("run_id", value) for value in ("", "r" * 65, "a/b", "a\n", None, 1)),
        *(("peer_id", value) for value in ("", "p" * 129, b"p", None)),
        *(
            (name, value)
            for name in ("not_before", "expires")
            for value in (math.nan, math.inf, -1.0, 1e16, "1")
        ),
        ("more", 1),
    ],
)
def test_a_signed_token_outside_its_limits_is_refused(name, value):
    fields = msgspec.structs.asdict(TOKEN) | {name: value}
    with pytest.raises(Refused):
        Token.decode(tokens._signed(tokens._TOKEN, encode(fields), KEY.private_key), PUBLIC)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("run_id", value) for value in ("", "r" * 65, None)),
        *(("version", value) for value in (-1, 1 << 63, 1.5, math.nan, None)),
        *(("peer_ids", value) for value in (None, "ab", [1], [""], ["p" * 129], [[]], {"a": 1})),
        ("peer_ids", [str(number) for number in range(MAX_BANNED + 1)]),
        ("more", 1),
    ],
)
def test_a_signed_ban_list_outside_its_limits_is_refused(name, value):
    fields = {"run_id": "run", "version": 1, "peer_ids": [PEER]} | {name: value}
    with pytest.raises(ProtocolError):
        BanList.decode(tokens._signed(tokens._BANS, encode(fields), KEY.private_key), PUBLIC)
