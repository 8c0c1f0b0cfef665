"""What both sides of an admission may say to each other: bounded, checked, or a ProtocolError."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.access import bans
from peers.access.request import parse_join, parse_nonce, parse_proof, parse_token, refusal
from peers.access.tokens import MAX_TOKEN_BYTES
from peers.errors import ProtocolError
from peers.protocol.refusal import Refused, Why

PARSERS = [parse_join, parse_nonce, parse_proof, parse_token, bans.parse]
VALUES = (
    st.none()
    | st.integers()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.binary(min_size=32, max_size=32)
    | st.binary(min_size=5000, max_size=5000)
    | st.lists(st.integers(), max_size=3)
)
KINDS = st.sampled_from(["join", "nonce", "proof", "token", "refused", "bans"])


@pytest.mark.parametrize("why", list(Why))
def test_every_refusal_is_heard_as_it_was_said_and_has_an_advice(why):
    with pytest.raises(Refused) as caught:
        parse_token(refusal(why))
    assert caught.value.why is why
    assert len(why.advice("12D3KooW")) > 40


@given(
    kind=KINDS | VALUES,
    fields=st.dictionaries(st.sampled_from(["nonce", "proof", "token", "why", "bans"]), VALUES),
)
def test_any_message_is_what_was_expected_or_a_protocol_error(kind, fields):
    message = {"kind": kind, **fields}
    for parse in PARSERS:
        try:
            value = parse(message)
        except ProtocolError:
            continue
        assert value is None or len(value) <= max(MAX_TOKEN_BYTES, 4000)
