from __future__ import annotations

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import ProtocolError
from peers.net.identity import Identity, claim_slot
from peers.protocol import records
from peers.protocol.certificates import Body, Certificate, Contributor, Member, Plan, Work
from peers.protocol.limits import (
    MAX_ATTEMPT,
    MAX_COUNT,
    MAX_EPOCH,
    MAX_PEERS,
    MAX_TOKENS,
    MAX_WORLD_RANK,
)
from peers.protocol.messages import Offer, Status
from peers.protocol.records import (
    MAX_AGE_S,
    MAX_RECORD_BYTES,
    NO_RANK,
    Announcement,
    CoordinatorRecord,
    OtherVersion,
    Spoken,
    seal,
    unseal,
)
from peers.protocol.wire import encode

NOW = 1_800_000_000.0
LISTS = ("maddrs", "endpoints", "paths")


@pytest.fixture(scope="module")
def peer(tmp_path_factory) -> Identity:
    return claim_slot(tmp_path_factory.mktemp("state"), "run", 0)


def announcement(peer: Identity) -> Announcement:
    return Announcement(
        peer_id=peer.peer_id,
        run_id="run",
        world_rank=1,
        incarnation=1_700_000_000_000_000_000,
        state="training",
        epoch=3,
        head="ab" * 32,
        step=35,
        local_step=5,
        committed_tokens=12_345,
        tokens_per_s=678.9,
        anchor_digest="cd" * 32,
        manifest_digest="",
        maddrs=("/ip4/127.0.0.1/tcp/30001",),
        time=NOW,
    )


def test_an_announcement_arrives_as_it_was_sent(peer):
    sent = announcement(peer)
    assert Announcement.decode(peer.peer_id, sent.encode(peer), NOW, run_id="run") == sent


def test_peers_tell_each_other_the_status_of_their_core_too_and_the_dht_has_none_of_it(peer):
    status = Status(incarnation=1, sequence=2, world_rank=1, phase="training", head="ab" * 32)
    said = Spoken.of(announcement(peer), status)
    assert Spoken.decode(peer.peer_id, said.encode(peer), NOW, run_id="run") == said
    with pytest.raises(ProtocolError):
        Announcement.decode(peer.peer_id, said.encode(peer), NOW)


def test_a_peer_that_has_no_world_rank_yet_may_say_so(peer):
    sent = msgspec.structs.replace(announcement(peer), world_rank=NO_RANK)
    assert Announcement.decode(peer.peer_id, sent.encode(peer), NOW) == sent


def test_a_coordinator_record_arrives_as_it_was_sent(peer):
    sent = CoordinatorRecord(peer_id=peer.peer_id, run_id="run", maddrs=("/ip4/127.0.0.1/tcp/1",), time=NOW)
    assert CoordinatorRecord.decode(peer.peer_id, sent.encode(peer), NOW, run_id="run") == sent


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peer_id", "12D3KooWsomebodyelse"),
        ("run_id", "another"),
        ("maddrs", ["not an address"]),
        ("time", NOW - MAX_AGE_S - 1),
        ("time", NOW + 60),
    ],
)
def test_a_signed_record_with_a_bad_field_is_refused(peer, field, value):
    fields = msgspec.structs.asdict(announcement(peer)) | {field: value}
    with pytest.raises(ProtocolError):
        Announcement.decode(peer.peer_id, seal(encode(fields), peer), NOW, run_id="run")


def test_a_record_under_another_peers_name_is_refused(peer, tmp_path):
    other = claim_slot(tmp_path, "run", 0)
    blob = announcement(peer).encode(peer)
    with pytest.raises(ProtocolError, match="not signed by it"):
        Announcement.decode(other.peer_id, blob, NOW)
    with pytest.raises(ProtocolError, match="not signed by it"):
        Announcement.decode(peer.peer_id, announcement(peer).encode(other), NOW)


def test_a_record_of_another_version_is_told_from_a_broken_one(peer, monkeypatch):
    monkeypatch.setattr(records, "PROTOCOL", 7)
    theirs = seal(encode({"a field": "of a later version"}), peer)
    monkeypatch.undo()
    with pytest.raises(OtherVersion, match="protocol 7, this one has 2"):
        Announcement.decode(peer.peer_id, theirs, NOW)
    unnumbered = msgpack.unpackb(theirs)
    del unnumbered["protocol"]
    with pytest.raises(OtherVersion, match="protocol 0"):
        Announcement.decode(peer.peer_id, msgpack.packb(unnumbered), NOW)
    with pytest.raises(ProtocolError, match="not signed by it"):
        Announcement.decode(peer.peer_id, msgpack.packb(unnumbered | {"payload": b"forged"}), NOW)


def test_one_flipped_bit_anywhere_is_noticed(peer):
    blob = announcement(peer).encode(peer)
    for index in range(len(blob)):
        flipped = blob[:index] + bytes([blob[index] ^ 1]) + blob[index + 1 :]
        with pytest.raises(ProtocolError):
            Announcement.decode(peer.peer_id, flipped, NOW)


def test_a_record_that_is_too_long_is_neither_made_nor_read(peer):
    with pytest.raises(ValueError, match="at most"):
        seal(b"y" * MAX_RECORD_BYTES, peer)
    with pytest.raises(ProtocolError, match="at most"):
        unseal(peer.peer_id, b"\0" * (MAX_RECORD_BYTES + 1))


def greatest_certificate(peer: Identity) -> Certificate:
    work = Work(tokens=MAX_TOKENS, norm=1e30, step=MAX_COUNT, based_on=MAX_COUNT, bandwidth=1e15)
    ranks = range(MAX_WORLD_RANK - MAX_PEERS, MAX_WORLD_RANK)
    plan = Plan(
        manifest="a" * 64,
        parent="b" * 64,
        epoch=MAX_EPOCH,
        fragment=MAX_COUNT,
        attempt=MAX_ATTEMPT,
        contributors=tuple(Contributor(peer.peer_id, rank, work, 0.5) for rank in ranks),
        roster=tuple(Member(peer.peer_id, rank) for rank in ranks),
        data_base=MAX_COUNT,
        tokens=MAX_COUNT,
    )
    body = Body(plan=plan, anchor="c" * 64, momentum="d" * 64)
    return Certificate(body=body, signatures=(peer.sign(b""),) * MAX_PEERS)


def test_the_greatest_swarm_can_begin_from_a_checkpoint_and_its_long_words_are_not_kept_in_memory(peer):
    certificate = greatest_certificate(peer)
    offer = Offer(anchor="c" * 64, momentum="d" * 64, certificate=certificate)
    status = Status(incarnation=1, sequence=2, world_rank=1, phase="waiting", offer=offer)
    blob = Spoken.of(announcement(peer), status).encode(peer)
    before = records._is_signed.cache_info()
    assert Spoken.decode(peer.peer_id, blob, NOW).status == status
    assert records._is_signed.cache_info() == before


@given(blob=st.binary(max_size=300))
def test_random_bytes_are_a_protocol_error(blob):
    with pytest.raises(ProtocolError):
        Announcement.decode("12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA", blob, NOW)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


@given(value=JSON)
def test_signed_nonsense_is_a_protocol_error(peer, value):
    payload = msgpack.packb(value)
    blob = seal(payload, peer)
    with pytest.raises(ProtocolError):
        Announcement.decode(peer.peer_id, blob, NOW)


@given(field=st.sampled_from(Announcement.__struct_fields__), value=JSON)
def test_any_value_in_any_field_is_taken_as_it_is_or_refused(peer, field, value):
    fields = msgspec.structs.asdict(announcement(peer)) | {field: value}
    try:
        decoded = Announcement.decode(peer.peer_id, seal(encode(fields), peer), NOW, run_id="run")
    except ProtocolError:
        return
    assert getattr(decoded, field) == (tuple(value) if field in LISTS else value)


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoints": ("/ip4/10.0.0.1/tcp/0",)},
        {"endpoints": ("10.0.0.1:7",)},
        {"endpoints": ("/ip4/10.0.0.1/tcp/7/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA",)},
        {"paths": ((1, "carrier pigeon"),)},
        {"paths": ((-1, "direct"),)},
        {"paths": ((1, "direct", 2),)},
    ],
)
def test_fields_that_may_be_left_out_are_refused_out_of_bounds(peer, fields):
    record = msgspec.structs.replace(announcement(peer), **fields)
    with pytest.raises(ProtocolError):
        Announcement.decode(peer.peer_id, record.encode(peer), NOW)


def test_endpoints_and_paths_arrive_as_they_were_sent(peer):
    record = msgspec.structs.replace(
        announcement(peer), endpoints=("/ip4/10.0.0.1/tcp/7",), paths=((1, "direct"), (2, "relay"))
    )
    assert Announcement.decode(peer.peer_id, record.encode(peer), NOW) == record
