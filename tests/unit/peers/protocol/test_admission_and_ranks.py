"""How the answers to a request for a token or a rank are read; their limits are in test_limits.py."""

from __future__ import annotations

import pytest
from msgspec.msgpack import Decoder

from peers.admission.ranks import granted
from peers.errors import ProtocolError, UserError
from peers.protocol.admission import Grant, Issued, Taken
from peers.protocol.refusal import Refusal, Refused, Why, unless_refused
from peers.protocol.wire import decode, encode

ANSWER: Decoder[Issued | Refusal] = Decoder(Issued | Refusal)
GRANT = Grant(world_rank=2, galaxy_size=3)


@pytest.mark.parametrize("why", list(Why))
def test_every_refusal_is_heard_as_it_was_said_and_has_an_advice(why):
    with pytest.raises(Refused) as caught:
        unless_refused(decode(ANSWER, encode(Refusal(why=why)), 1024))
    assert caught.value.why is why
    assert len(why.advice("12D3KooW")) > 40


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
