"""What both sides of an admission, and of a request for a rank, may say: within its limits, or a ProtocolError."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Decoder

from peers.admission.ranks import granted
from peers.errors import ProtocolError, UserError
from peers.protocol.admission import AskRank, Bans, Grant, Issued, Join, Nonce, Proof, Taken
from peers.protocol.limits import MAX_BANS_BYTES, MAX_TOKEN_BYTES, MAX_WORLD_RANK

from peers.protocol.refusal import Refusal, Refused, Why, unless_refused
from peers.protocol.wire import Struct, decode, encode

ANSWER: Decoder[Issued | Refusal] = Decoder(Issued | Refusal)
RANK: Decoder[Grant | Taken | Refusal] = Decoder(Grant | Taken | Refusal)
GRANT = Grant(world_rank=2, galaxy_size=3)
MESSAGES = [
    Join(),
    Nonce(nonce=b"n" * 32),
    Proof(proof=b"p" * 32),
    Issued(token=b"t"),
    Refusal(why=Why.BANNED),
    Bans(signed=b""),
    AskRank(wanted=None, token=b""),
    GRANT,
    Taken(holder="12D3KooW"),
]

def read(kind: Any, message: object) -> Any:
    return decode(Decoder(kind), encode(message), 1 << 20)

def changed(message: Struct, name: str, value: object) -> dict[str, object]:
    return msgspec.msgpack.decode(encode(message)) | {name: value}

@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_is_read_back_as_it_was_written(message):
    assert read(type(message), message) == message

@pytest.mark.parametrize("why", list(Why))
def test_every_refusal_is_heard_as_it_was_said_and_has_an_advice(why):
    with pytest.raises(Refused) as caught:
        unless_refused(decode(ANSWER, encode(Refusal(why=why)), 1024))
    assert caught.value.why is why
    assert len(why.advice("12D3KooW")) > 40

@pytest.mark.parametrize(
    ("message", "name", "value"),
    [
        *(
            (message, "type", value)
            for message in MESSAGES
            for value in ("status", "", 3, None, [], math.nan)
        ),
        *((message, "more", 1) for message in MESSAGES),
        *((MESSAGES[1], "nonce", value) for value in (b"", b"n" * 31, b"n" * 33, "n" * 32, None, [1] * 32)),
        *((MESSAGES[2], "proof", value) for value in (b"", b"p" * 31, b"p" * 33, "p" * 32, None)),
        *((MESSAGES[3], "token", value) for value in (b"", b"t" * (MAX_TOKEN_BYTES + 1), "t", None)),
        *((MESSAGES[4], "why", value) for value in ("because", "", None, 1)),
        *((MESSAGES[5], "signed", value) for value in (b"b" * (MAX_BANS_BYTES + 1), "b", None, [])),
        *((MESSAGES[6], "wanted", value) for value in (-1, MAX_WORLD_RANK + 1, 1.0, True, "1", math.nan)),
        *((MESSAGES[6], "token", value) for value in (b"t" * (MAX_TOKEN_BYTES + 1), "", None)),
        *((GRANT, "world_rank", value) for value in (-1, MAX_WORLD_RANK + 1, 2.0, True, None)),
        *((GRANT, "galaxy_size", value) for value in (0, -1, 10**12, 1.5, None)),
        *((MESSAGES[8], "holder", value) for value in ("", "x" * 129, b"x", None)),
    ],
)
def test_a_value_outside_its_limits_is_refused(message, name, value):
    with pytest.raises(ProtocolError):
        read(type(message), changed(message, name, value))

@pytest.mark.parametrize("message", [message for message in MESSAGES if message.__struct_fields__])
def test_a_message_without_a_field_is_refused(message):
    for name in message.__struct_fields__:
        fields = msgspec.msgpack.decode(encode(message))
        del fields[name]
        with pytest.raises(ProtocolError, match="missing"):
            read(type(message), fields)

def test_a_rank_is_granted_to_whom_asked_for_it_or_for_any():
    assert granted(GRANT, None) == granted(GRANT, 2) == GRANT
    with pytest.raises(ProtocolError):
        granted(GRANT, 4)
    with pytest.raises(ProtocolError):
        granted(Taken(holder="X"), None)
    with pytest.raises(Refused):
        granted(Refusal(why=Why.BANNED), None)

def test_a_taken_rank_is_the_users_to_mend():
    with pytest.raises(UserError, match="world rank 4 is taken by the live peer X"):
        granted(Taken(holder="X"), 4)

VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.binary(min_size=32, max_size=32)
    | st.binary(min_size=5000, max_size=5000)
    | st.lists(st.integers(0, 9), max_size=3)
)
TAGS = st.sampled_from(["join", "nonce", "proof", "token", "refused", "bans", "rank", "grant", "taken"])
FIELDS = sorted({name for message in MESSAGES for name in message.__struct_fields__})

@given(tag=TAGS | VALUES, fields=st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_message_is_one_of_those_wanted_or_a_protocol_error(tag, fields):
    blob = encode({"type": tag, **fields})
    for decoder in (*(Decoder(type(message)) for message in MESSAGES), ANSWER, RANK):
        try:
            message = decode(decoder, blob, 1 << 20)
        except ProtocolError:
            continue
        assert decode(decoder, encode(message), 1 << 20) == message
