from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from peers.admission import service
from peers.admission.own_token import OwnToken
from peers.admission.secrets import AdmissionKey, AdmissionSettings
from peers.admission.service import (
    MAX_KEPT_BYTES,
    MAX_NEW_BYTES,
    MAX_TTL_S,
    AdmissionService,
    guard_storage,
)
from peers.errors import PeerUnreachable, UserError
from peers.net.gate import Gate
from peers.net.identity import load_or_create
from peers.net.private_files import write_private
from peers.protocol import records
from peers.protocol.records import MAX_RECORD_BYTES, PEERS_KEY, Announcement, OtherVersion
from tests.support.announcements import announced

NOW = 1_800_000_000.0


class FakeDht:
    def __init__(self):
        self.peer_id, self.checks, self.initial_peers = "me", {}, frozenset()

    def keep(self, key, check):
        self.checks[key] = check


@pytest.fixture
def check(monkeypatch):
    """The check of the run's key, to which all records are valid."""
    monkeypatch.setattr(Announcement, "decode", lambda peer_id, *_, run_id: announced(peer_id))
    monkeypatch.setattr(service, "time", SimpleNamespace(time=lambda: NOW))
    dht = FakeDht()
    guard_storage(dht, "run", Gate("run"))
    return dht.checks[PEERS_KEY("run")]


@pytest.fixture
def store(monkeypatch, check):
    """A function that stores a record of this length under the run's key, and returns whether it was accepted."""

    def store(subkey, num_bytes, now=NOW):
        monkeypatch.setattr(service, "time", SimpleNamespace(time=lambda: now))
        return check(subkey, bytes(num_bytes), expiry=now + 20, is_found=False)

    return store


def test_strangers_cannot_fill_a_key_until_its_records_exceed_a_message_and_known_peers_stay(store):
    assert store("honest", 1000)
    num_taken = sum(store(f"stranger {number}", MAX_RECORD_BYTES) for number in range(1200))
    assert 0.95 * MAX_NEW_BYTES < num_taken * MAX_RECORD_BYTES < MAX_NEW_BYTES
    assert store("honest", 3000, NOW + 1)
    # Expired records make room.
    assert not store("new", MAX_RECORD_BYTES, NOW + 1)
    assert store("new", MAX_RECORD_BYTES, NOW + 20)


def test_short_records_that_grow_later_do_not_exceed_a_message_either(store):
    num_taken = sum(store(f"peer {number:05}", 200) for number in range(10_000))
    num_grown = sum(store(f"peer {number:05}", MAX_RECORD_BYTES, NOW + 1) for number in range(num_taken))
    assert num_grown * MAX_RECORD_BYTES + (num_taken - num_grown) * 200 <= MAX_KEPT_BYTES
    assert store("peer 00000", MAX_RECORD_BYTES, NOW + 2) and store(f"peer {num_taken - 1:05}", 200, NOW + 2)


def test_a_thousand_peers_find_room(store):
    assert all(store(f"{number:052}", 1500) for number in range(1000))
    assert all(store(f"{number:052}", 1600, NOW + 5) for number in range(1000))


@pytest.mark.parametrize("is_found", [False, True])
def test_a_record_that_would_never_expire_is_refused(check, is_found):
    """With NaN at the root of Hivemind's heap, none of the key's records would."""
    assert check("peer", b"record", expiry=NOW + MAX_TTL_S, is_found=is_found)
    for expiry in (math.nan, math.inf, NOW + MAX_TTL_S + 1):
        assert not check("peer", b"record", expiry=expiry, is_found=is_found)


def test_a_record_of_another_version_is_noted_where_it_is_found_and_never_kept(monkeypatch, tmp_path):
    identity, gate, dht, now = load_or_create(tmp_path / "key"), Gate("run"), FakeDht(), time.time()
    monkeypatch.setattr(records, "PROTOCOL", 7)
    theirs = announced(identity.peer_id, run_id="run").encode(identity)
    monkeypatch.undo()
    updated = replace(announced(identity.peer_id, run_id="run"), time=now).encode(identity)
    identity.release()
    guard_storage(dht, "run", gate)
    check = dht.checks[PEERS_KEY("run")]
    assert not check(identity.peer_id, theirs, expiry=now + 20, is_found=False)
    dht.peer_id = identity.peer_id
    assert not check(identity.peer_id, theirs, expiry=now + 20, is_found=True)
    assert gate.other_version is None, (
        "anybody may have sent the one, and it was itself before it was updated"
    )
    dht.peer_id = "me"
    assert not check(identity.peer_id, theirs, expiry=now + 20, is_found=True)
    assert gate.other_version is None, "any stranger may say that it has another version"
    dht.initial_peers = frozenset({identity.peer_id})
    assert not check(identity.peer_id, theirs, expiry=now + 20, is_found=True)
    assert isinstance(gate.other_version, OtherVersion)
    assert check(identity.peer_id, updated, expiry=now + 20, is_found=True)
    assert gate.other_version is None


async def test_a_peer_without_an_issuer_that_it_can_read_says_that_the_versions_differ(monkeypatch, tmp_path):
    async def obtain(_own):
        raise PeerUnreachable("no issuer of tokens for this swarm secret answers")

    monkeypatch.setattr(OwnToken, "obtain", obtain)
    write_private(tmp_path / "secret", AdmissionKey.new().secret.to_text().encode())
    identity = SimpleNamespace(peer_id="me", path=tmp_path / "key")
    settings = AdmissionSettings(swarm_secret_file=str(tmp_path / "secret"), use_environment=False)
    admission = AdmissionService("run", identity, FakeDht(), settings)
    with pytest.raises(PeerUnreachable, match="no issuer"):
        await admission.enter()
    admission.gate.other_version = OtherVersion(7)
    with pytest.raises(UserError, match="another version of diloco"):
        await admission.enter()
