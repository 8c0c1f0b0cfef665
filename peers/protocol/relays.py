"""The relay protocol: how two peers that cannot reach each other open a stream through a third one.

    caller               relay                called
    Want           ->                                       protocol diloco/<run_id>/relay
                   <-    Offer | No
    Go             ->
                         Deliver        ->                  protocol diloco/<run_id>/relayed
                   <-    Ready
    <---- the greeting, TLS 1.3 from end to end, the stream ----->

The relay (peers/net/paths/relay.py) sees ciphertext only; the two ends authenticate each other by the same
greeting as on a direct connection.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from peers.protocol.limits import MAX_SHORT_TEXT, Count, PeerId, Real, ShownText
from peers.protocol.wire import Struct

MAX_MESSAGE_BYTES = 1024


def asking(run_id: str) -> str:
    """The protocol between caller and relay."""
    return f"diloco/{run_id}/relay"


def delivering(run_id: str) -> str:
    """The protocol between relay and called peer."""
    return f"diloco/{run_id}/relayed"


class Want(Struct, frozen=True, tag="want"):
    to: PeerId


class No(Struct, frozen=True, tag="no"):
    reason: Annotated[ShownText, Meta(max_length=MAX_SHORT_TEXT)]


class Offer(Struct, frozen=True, tag="offer"):
    rate: Real
    """Bytes/s that rounds have moved from the relay to the called peer; 0: not known."""
    load: Count
    """Streams that the relay forwards already."""


class Go(Struct, frozen=True, tag="go"):
    """The caller accepts the offer."""


class Ready(Struct, frozen=True, tag="ready"):
    """The stream is connected: what follows is between caller and called peer."""


class Deliver(Struct, frozen=True, tag="deliver"):
    caller: PeerId
