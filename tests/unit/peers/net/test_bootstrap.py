import asyncio

import pytest

from peers.errors import PeerUnreachable, UserError
from peers.net.dht.bootstrap import connect_any

MISMATCH = (
    "failed to negotiate security protocol: peer id mismatch: expected 12D3A, but remote key matches 12D3B"
)
REFUSED = "dial tcp4 127.0.0.1:1: connect: connection refused"
SILENT = "context deadline exceeded"
RESET = "failed to negotiate security protocol: EOF"
PEERS = [
    f"/ip4/127.0.0.1/tcp/{port}/p2p/12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW" for port in (1, 2)
]


class Addresses:
    """A transport of which each address fails in its own way, or not."""

    def __init__(self, *errors):
        self._errors = dict(zip(PEERS, errors, strict=True))

    async def connect(self, peer_id, maddrs, *, timeout_s):
        if error := self._errors[maddrs[0]]:
            raise PeerUnreachable(error)


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ((MISMATCH, MISMATCH), UserError),
        ((MISMATCH, REFUSED), PeerUnreachable),
        ((REFUSED, SILENT), PeerUnreachable),
        # A proxy of a container, or of ssh, accepts connections while nothing listens behind it.
        ((RESET, RESET), PeerUnreachable),
    ],
)
def test_only_an_answer_of_another_peer_is_a_mistake_of_the_user(errors, kind):
    with pytest.raises((PeerUnreachable, UserError), match="none of the initial peers answers") as raised:
        asyncio.run(connect_any(Addresses(*errors), PEERS, timeout_s=1.0))
    assert type(raised.value) is kind


def test_one_address_that_answers_is_enough():
    assert asyncio.run(connect_any(Addresses(MISMATCH, None), PEERS, timeout_s=1.0)) == PEERS[1:]
