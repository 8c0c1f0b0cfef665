from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import UserError
from peers.protocol.maddrs import by_reach, check_listenable, is_maddr, parse_maddr, validate_maddr

PEER_ID = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/0.0.0.0/tcp/0",
        f"/ip4/203.0.113.7/tcp/30001/p2p/{PEER_ID}",
        f"/ip6/2001:db8::1/tcp/30001/p2p/{PEER_ID}",
        "/dns4/node.example.org/tcp/443",
        "/dns/localhost/tcp/1/p2p/QmZHWxRK76nZSNEuqYYk8uBwzopUHxoQDdhpeQDGJyWCz1",
    ],
)
def test_addresses_are_read_and_written_back(text):
    assert str(parse_maddr(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not an address"),
        ("127.0.0.1:30001", "not an address"),
        ("/ip4/127.0.0.1/udp/30001", "only TCP"),
        ("/ip4/127.0.0.1/tcp", "not an address"),
        ("/ip4/127.0.0.256/tcp/1", "not a host"),
        ("/ip6/127.0.0.1/tcp/1", "not a host"),
        # Python accepts a zone of any length as part of an address; libp2p and its parsers do not.
        ("/ip6/fe80::1%eth0/tcp/1", "not a host"),
        ("/dns4/-bad-/tcp/1", "not a host"),
        ("/ip4/127.0.0.1/tcp/65536", "not a port"),
        ("/ip4/127.0.0.1/tcp/x", "not a port"),
        ("/ip4/127.0.0.1/tcp/1/p2p/", "not a peer id"),
        (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID[:-9]}", "copy the whole address"),
        ("/ip4/127.0.0.1/tcp/1/p2p/0OIl", "not a peer id"),
    ],
)
def test_what_is_wrong_with_an_address_is_said(text, said):
    with pytest.raises(UserError, match=said):
        validate_maddr(text)


def test_an_initial_peer_needs_an_id_and_a_port_and_a_listener_has_no_id():
    validate_maddr(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}", peer_id=True)
    with pytest.raises(UserError, match="lacks the peer's id"):
        validate_maddr("/ip4/127.0.0.1/tcp/1", peer_id=True)
    with pytest.raises(UserError, match="copy the whole address that `diloco dht start` prints, like /ip4/"):
        validate_maddr("127.0.0.1:30001", peer_id=True)
    with pytest.raises(UserError, match="port 0"):
        validate_maddr(f"/ip4/127.0.0.1/tcp/0/p2p/{PEER_ID}", peer_id=True)
    with pytest.raises(UserError, match="names a peer"):
        validate_maddr(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}", peer_id=False)


@given(st.text(max_size=80))
def test_any_text_is_an_address_or_a_user_error(text):
    assert is_maddr(text) in (True, False)


def test_a_port_in_use_is_refused_and_a_free_one_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use"):
            check_listenable([f"/ip4/127.0.0.1/tcp/{port}"])
        with pytest.raises(UserError, match=f"port {port} is in use"):
            check_listenable([f"/ip4/0.0.0.0/tcp/{port}"])
    check_listenable([f"/ip4/127.0.0.1/tcp/{port}"])


def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(UserError, match=r"203\.0\.113\.7 is not an address of this machine"):
        check_listenable(["/ip4/203.0.113.7/tcp/0"])


def test_addresses_with_the_farthest_reach_come_first():
    loopback, private, public = "/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1", "/ip4/8.8.8.8/tcp/1"
    assert by_reach([loopback, private, public]) == [public, private, loopback]
