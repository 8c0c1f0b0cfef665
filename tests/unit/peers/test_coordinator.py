from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import peers
from peers.coordinator import lines_to_paste
from peers.errors import ProtocolError, UserError
from peers.ranks.ledger import Grant, Taken
from peers.ranks.request import parse_answer, parse_request, to_message

SHOWN = ["/ip4/10.0.0.2/tcp/4001/p2p/ID", "/ip4/127.0.0.1/tcp/4001/p2p/ID"]


def test_the_line_to_paste_is_the_address_of_farthest_reach():
    assert lines_to_paste(SHOWN, ["/ip4/0.0.0.0/tcp/0"], [], "ID") == [
        "--initial-peers /ip4/10.0.0.2/tcp/4001/p2p/ID"
    ]


def test_behind_a_router_the_first_line_works_here_and_the_second_from_elsewhere():
    lines = lines_to_paste(
        ["/ip4/8.8.8.8/tcp/9/p2p/ID"], ["/ip4/0.0.0.0/tcp/4001"], ["/ip4/8.8.8.8/tcp/9"], "ID"
    )
    assert lines == [
        "--initial-peers /ip4/127.0.0.1/tcp/4001/p2p/ID",
        "--initial-peers /ip4/8.8.8.8/tcp/9/p2p/ID",
    ]


def test_a_grant_survives_the_wire():
    assert parse_answer(to_message(Grant(2, 9, 3)), None) == Grant(2, 9, 3)
    assert parse_answer(to_message(Grant(2, 9, 3)), 2) == Grant(2, 9, 3)


def test_a_taken_rank_is_the_users_to_mend():
    with pytest.raises(UserError, match="world rank 4 is taken by the live peer X"):
        parse_answer(to_message(Taken("X")), 4)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"kind": "grant"},
        {"kind": "grant", "world_rank": -1, "fencing": 1, "galaxy_size": 1},
        {"kind": "grant", "world_rank": 5, "fencing": 1, "galaxy_size": 1},
        {"kind": "grant", "world_rank": 4, "fencing": "1", "galaxy_size": 1},
        {"kind": "grant", "world_rank": 4, "fencing": 1, "galaxy_size": 0},
        {"kind": "grant", "world_rank": 4, "fencing": 1, "galaxy_size": 10**12},
    ],
)
def test_an_answer_that_is_none_is_a_protocol_error(message):
    with pytest.raises(ProtocolError):
        parse_answer(message, 4)


@given(
    st.dictionaries(
        st.sampled_from(["kind", "wanted", "token"]),
        st.none() | st.integers() | st.sampled_from(["rank", "x"]) | st.booleans() | st.binary(),
    )
)
def test_a_request_is_a_rank_or_none_and_a_token_or_a_protocol_error(message):
    try:
        wanted, token = parse_request(message)
    except ProtocolError:
        return
    assert message["kind"] == "rank" and isinstance(token, bytes)
    assert wanted is None or (type(wanted) is int and 0 <= wanted < 1 << 20)


def test_importing_the_coordinator_loads_neither_torch_nor_hivemind():
    code = "import peers.coordinator, sys; print([m for m in ('torch', 'hivemind') if m in sys.modules])"
    root = Path(peers.__file__).parent.parent
    assert subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True).strip() == "[]"
