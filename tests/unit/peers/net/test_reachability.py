from __future__ import annotations

import math

import pytest
from msgspec.msgpack import encode

from peers.errors import ProtocolError
from peers.net.paths import reachability
from peers.net.paths.reachability import caller_of
from peers.protocol import reach
from peers.protocol.tokens import MAX_TOKEN_BYTES
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

@pytest.mark.parametrize(
    "question",
    [
        {"type": "dial", "port": 0},
        {"type": "dial", "port": 65536},
        {"type": "dial", "port": "22"},
        {"type": "dial", "port": True},
        {"type": "dial", "port": 22, "host": "203.0.113.7"},
        {"type": "dial"},
        {"port": 22},
        {"type": "speed", "port": 22},
        {"type": "run", "command": "reboot"},
    ],
)
def test_what_is_no_port_of_the_caller_is_not_dialled(question):
    with pytest.raises(ProtocolError):
        read(reachability._QUESTION, question)

@pytest.mark.parametrize(
    "message",
    [
        {"type": "hello"},
        {"type": "hello", "token": ""},
        {"type": "hello", "token": b"t" * (MAX_TOKEN_BYTES + 1)},
        {"type": "dial", "port": 1},
    ],
)
def test_a_conversation_begins_with_a_token_be_it_an_empty_one(message):
    assert read(reachability._HELLO, {"type": "hello", "token": b""}).token == b""
    with pytest.raises(ProtocolError):
        read(reachability._HELLO, message)

@pytest.mark.parametrize("error", ["\x1b[2J\x1b[Hall is well", "no\nanswer", "x" * 201, None, b"refused"])
def test_what_a_member_says_of_a_call_reaches_no_terminal_unless_it_is_plain_and_short(error):
    with pytest.raises(ProtocolError):
        read(reachability._DIALLED, {"type": "dialled", "error": error})

@pytest.mark.parametrize("host", ["tracking.example", "::::", "203.0.113", "fe80::1%eth0", "1" * 46, None, 7])
def test_a_member_sees_a_machine_at_an_address_and_at_no_name_to_be_looked_up(host):
    for known in ("203.0.113.7", "2001:db8::1", ""):
        here = read(reachability._HERE, {"type": "here", "host": known, "time": 5.0})
        assert reachability._address(here.host) == known
    with pytest.raises(ProtocolError):
        reachability._address(
            read(reachability._HERE, {"type": "here", "host": host, "time": 5.0}).host
        )

@pytest.mark.parametrize("time", [math.nan, math.inf, -1.0, 1e16, True, "now", None])
def test_a_member_says_what_time_it_is(time):
    with pytest.raises(ProtocolError):
        read(reachability._HERE, {"type": "here", "host": "", "time": time})
    with pytest.raises(ProtocolError):
        read(reachability._HERE, {"type": "here", "host": ""})

@pytest.mark.parametrize(
    "change",
    [
        *({"num_bytes": value} for value in (-1, 1.5, 1 << 63, None, True)),
        *({"seconds": value} for value in (-1.0, math.nan, math.inf, 1e16, "1", True)),
    ],
)
def test_how_long_bytes_took_is_a_finite_amount(change):
    took = {"type": "took", "num_bytes": 5, "seconds": 1.0}
    assert read(reachability._TOOK, took) == reach.Took(num_bytes=5, seconds=1.0)
    with pytest.raises(ProtocolError):
        read(reachability._TOOK, {**took, **change})
    with pytest.raises(ProtocolError):
        read(reachability._TOOK, {name: took[name] for name in took if name not in change})

@pytest.mark.parametrize("num_bytes", [-1, reach.BURSTS[-1] + 1, 1.5, "1", True, None])
def test_a_burst_is_no_longer_than_the_longest(num_bytes):
    with pytest.raises(ProtocolError):
        read(reachability._BURST, {"type": "burst", "num_bytes": num_bytes})
