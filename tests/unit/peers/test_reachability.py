from __future__ import annotations

import pytest

from peers.errors import ProtocolError
from peers.network.reachability import Budget, _port_of, _token_of, caller_of
from peers.network.reachability_request import _host_of, _text_of


def test_a_host_may_ask_a_few_times_at_once_and_then_now_and_then():
    budget = Budget()
    assert [budget.spend("1.2.3.4", now=100.0) for _ in range(10)] == [True] * 8 + [False] * 2
    assert not budget.spend("1.2.3.4", now=114.0)
    assert budget.spend("1.2.3.4", now=115.0)
    assert not budget.spend("1.2.3.4", now=115.0)
    assert budget.spend("5.6.7.8", now=115.0)


def test_who_goes_on_asking_in_vain_is_heard_as_soon_as_who_does_not():
    budget = Budget()
    for _ in range(1000):
        budget.spend("1.2.3.4", now=0.0)
    assert budget.spend("1.2.3.4", now=15.0)


def test_the_budget_of_many_hosts_takes_little_memory():
    budget = Budget()
    for number in range(5000):
        assert budget.spend(f"host {number}", now=0.0)
    assert len(budget._free_at) == 1024


def test_only_an_address_that_a_connection_really_comes_from_is_ever_dialled():
    relay = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW/p2p-circuit"
    assert caller_of([relay]) is None
    assert caller_of(["/dns4/victim.example/tcp/80", "/ip4/1.2.3.4/udp/4001/quic", "nonsense"]) is None
    caller = caller_of([relay, "/ip4/1.2.3.4/tcp/40000"])
    assert caller is not None and caller.host == "1.2.3.4"
    assert caller_of([]) is None


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "dial", "port": 0},
        {"kind": "dial", "port": 65536},
        {"kind": "dial", "port": "22"},
        {"kind": "dial", "port": True},
        {"kind": "dial", "port": 22, "host": "203.0.113.7"},
        {"kind": "dial"},
    ],
)
def test_what_is_no_port_of_the_caller_is_not_dialled(message):
    with pytest.raises(ProtocolError):
        _port_of(message)


@pytest.mark.parametrize(
    "message", [{"kind": "hello"}, {"kind": "hello", "token": ""}, {"kind": "dial", "port": 1}]
)
def test_a_conversation_begins_with_a_token_be_it_an_empty_one(message):
    with pytest.raises(ProtocolError):
        _token_of(message)


@pytest.mark.parametrize("error", ["\x1b[2J\x1b[Hall is well", "no\nanswer", "x" * 201, None, b"refused"])
def test_what_a_member_says_of_a_call_reaches_no_terminal_unless_it_is_plain_and_short(error):
    with pytest.raises(ProtocolError):
        _text_of({"kind": "dialled", "error": error}, "dialled", "error")


def test_a_member_sees_a_machine_at_an_address_and_at_no_name_to_be_looked_up():
    assert _host_of({"kind": "here", "host": "203.0.113.7"}) == "203.0.113.7"
    assert _host_of({"kind": "here", "host": ""}) == ""
    with pytest.raises(ProtocolError):
        _host_of({"kind": "here", "host": "tracking.example"})
