from __future__ import annotations

import stat

import pytest

from peers.daemon import known_peers
from peers.daemon.known_peers import KnownPeers
from tests.support.announcements import announced
from tests.support.keys import credentials


@pytest.fixture
def here(tmp_path):
    """Announcements of four peers at different addresses, by peer id."""
    ids = [credentials(tmp_path, name).peer_id for name in "abcd"]
    return {
        peer_id: announced(peer_id, maddrs=(f"/ip4/10.0.0.{number}/tcp/4001/p2p/{peer_id}",))
        for number, peer_id in enumerate(ids)
    }


def test_addresses_are_there_after_a_restart_and_only_the_user_can_read_them(tmp_path, here):
    path = tmp_path / "run.peers"
    known = KnownPeers(path)
    assert known.maddrs_of == {}
    known.update(here)
    assert KnownPeers(path).maddrs_of == {peer_id: record.maddrs for peer_id, record in here.items()}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_peers_that_are_not_seen_now_are_still_known(tmp_path, here):
    path = tmp_path / "run.peers"
    KnownPeers(path).update(here)
    KnownPeers(path).update({})
    assert KnownPeers(path).maddrs_of.keys() == here.keys()


def test_made_up_peers_do_not_replace_those_that_are_here_but_those_that_are_gone(
    tmp_path, here, monkeypatch
):
    monkeypatch.setattr(known_peers, "MAX_CONTACTS", 2)
    a, b, *new = here
    known = KnownPeers(tmp_path / "run.peers")
    known.update({peer_id: here[peer_id] for peer_id in (a, b)})
    known.update(here)
    assert known.maddrs_of.keys() == {a, b}
    known.update({peer_id: here[peer_id] for peer_id in (a, *new)})
    assert a in known.maddrs_of and b not in known.maddrs_of and len(known.maddrs_of) == 2


def test_a_file_that_cannot_be_used_ends_no_coordinator(tmp_path, here):
    path = tmp_path / "run.peers"
    path.write_bytes(b"\xff\0 /ip4/10.0.0.1/tcp/4001\n/ip4/10.0.0.1/tcp/4001/p2p/nobody")
    assert KnownPeers(path).maddrs_of == {}
    known = KnownPeers(tmp_path / "no directory" / "run.peers")
    known.update(here)
    assert known.maddrs_of == {}
