from peers.net.paths.network import NetworkSettings, announced_endpoints, data_hosts

LOOPBACK, LAN, PUBLIC = "/ip4/127.0.0.1/tcp/4", "/ip4/10.0.0.2/tcp/4", "/ip4/203.0.113.7/tcp/4"


def announced(*seen, port=9, **settings):
    return announced_endpoints(
        NetworkSettings(**settings), port, [f"{maddr}/p2p/12D3KooWx" for maddr in seen]
    )


def test_the_data_port_is_announced_on_the_hosts_that_libp2p_is_seen_by(monkeypatch):
    monkeypatch.setattr("peers.protocol.maddrs.is_peer_id", lambda _: True)
    assert announced(PUBLIC, LAN, LOOPBACK) == ("/ip4/203.0.113.7/tcp/9", "/ip4/10.0.0.2/tcp/9")
    assert announced(LOOPBACK) == ("/ip4/127.0.0.1/tcp/9",)
    assert announced(PUBLIC, port=0) == ()


def test_what_the_user_says_of_the_data_port_is_what_others_hear():
    said = ("/ip4/203.0.113.7/tcp/30009", "/dns/peer.example/tcp/0")
    assert announced(announce_data_maddrs=said) == ("/ip4/203.0.113.7/tcp/30009", "/dns/peer.example/tcp/9")


def test_a_host_that_maps_few_ports_is_not_taken_to_map_the_data_port():
    host = ("/ip4/0.0.0.0/tcp/4",)
    assert announced(host_maddrs=host, announce_maddrs=("/ip4/203.0.113.7/tcp/30004",)) == ()
    assert announced(host_maddrs=host, announce_maddrs=(PUBLIC,)) == ("/ip4/203.0.113.7/tcp/9",)


def hosts(*host_maddrs):
    return [f"/{maddr.kind}/{maddr.host}" for maddr in data_hosts(host_maddrs)]


def test_data_is_taken_on_every_host_that_libp2p_listens_on_and_on_none_twice():
    both = ("/ip4/0.0.0.0/tcp/4", "/ip6/::/tcp/4")
    assert hosts(*both) == ["/ip4/0.0.0.0", "/ip6/::"]
    assert hosts("/ip4/10.0.0.2/tcp/4", "/ip4/10.0.0.2/tcp/5", "/ip4/10.1.0.2/tcp/4") == [
        "/ip4/10.0.0.2",
        "/ip4/10.1.0.2",
    ]
    assert hosts("/ip4/10.0.0.2/tcp/4", *both) == ["/ip4/0.0.0.0", "/ip6/::"]
