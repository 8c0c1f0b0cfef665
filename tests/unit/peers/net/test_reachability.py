from __future__ import annotations

import pytest
from msgspec.msgpack import encode

from peers.errors import ProtocolError
from peers.net.paths import reachability
from peers.net.paths.reachability import caller_of
from peers.protocol import reach
from peers.protocol.wire import decode


def read(decoder, message):
    return decode(decoder, encode(message), reach.MAX_MESSAGE_BYTES)


def test_only_an_address_that_a_connection_really_comes_from_is_ever_dialled():
    relay = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW/p2p-circuit"
    assert caller_of([relay]) is None
    assert caller_of(["/dns4/victim.example/tcp/80", "/ip4/1.2.3.4/udp/4001/quic", "nonsense"]) is None
    caller = caller_of([relay, "/ip4/1.2.3.4/tcp/40000"])
    assert caller is not None and caller.host == "1.2.3.4"
    assert caller_of([]) is None


@pytest.mark.parametrize("host", ["tracking.example", "::::", "203.0.113", "fe80::1%eth0", "1" * 46, None, 7])
def test_a_member_sees_a_machine_at_an_address_and_at_no_name_to_be_looked_up(host):
    for known in ("203.0.113.7", "2001:db8::1", ""):
        here = read(reachability._HERE, {"type": "here", "host": known, "time": 5.0})
        assert reachability._address(here.host) == known
    with pytest.raises(ProtocolError):
        reachability._address(read(reachability._HERE, {"type": "here", "host": host, "time": 5.0}).host)
