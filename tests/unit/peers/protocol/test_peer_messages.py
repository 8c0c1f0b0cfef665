"""What peers say about relayed streams and states, outside the limits of its types: refused."""

from __future__ import annotations

import math

import msgspec
import pytest
from msgspec.msgpack import Decoder

from peers.errors import ProtocolError
from peers.protocol import limits, relays, states
from peers.protocol.wire import decode, encode

OFFER = relays.Offer(rate=1e6, load=2)
WANT, NO, DELIVER = relays.Want(to="peer1"), relays.No(reason="because"), relays.Deliver(caller="peer1")
COMMITS = states.Commits(count=3)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        *(
            (OFFER, {"rate": rate})
            for rate in (math.nan, math.inf, -1.0, 1.1 * limits.MAX_REAL, "1", True, None)
        ),
        *((OFFER, {"load": load}) for load in (-1, 1.5, limits.MAX_COUNT + 1, "1", True, None)),
        (OFFER, {"more": 1}),
        (OFFER, {"type": "no"}),
        *((WANT, {"to": peer_id}) for peer_id in ("", "p" * 129, b"peer1", 7, None)),
        *((DELIVER, {"caller": peer_id}) for peer_id in ("", "p" * 129, b"peer1", 7, None)),
        *((NO, {"reason": reason}) for reason in ("x" * 301, "\x1b[2J", "a\nb", b"because", 7, None)),
        *((COMMITS, {"count": count}) for count in (-1, 0.5, limits.MAX_COUNT + 1, "1", True, None)),
    ],
)
def test_a_value_outside_its_limits_is_refused_as_is_a_missing_one(message, change):
    decoder = Decoder(type(message))
    fields = msgspec.msgpack.decode(encode(message))
    assert decode(decoder, encode(fields), 1024) == message
    with pytest.raises(ProtocolError):
        decode(decoder, encode({**fields, **change}), 1024)
    for name in change.keys() & set(message.__struct_fields__):
        with pytest.raises(ProtocolError):
            decode(decoder, encode({other: fields[other] for other in fields if other != name}), 1024)


@pytest.mark.parametrize(
    "fields", [{"type": "\x1b[2J"}, {"type": "go", "\x1b[2J": 1}, {"type": "go", "a\u202eb": 1}]
)
def test_what_is_said_of_a_message_that_is_none_holds_nothing_that_a_terminal_obeys(fields):
    with pytest.raises(ProtocolError) as caught:
        decode(Decoder(relays.Go | relays.Ready), encode(fields), 1024)
    assert str(caught.value).isprintable()
