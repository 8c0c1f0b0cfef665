"""How a newcomer finds members of its run on the local network, over UDP multicast.

newcomer -> group      AskLan      a few times
member   -> newcomer   HereOnLan   from the address that it is reached at

An answer contains a port and a peer id but no host, so it cannot send the newcomer to another machine. Requests are
padded to at least the length of an answer, so that answers cannot be used to amplify a flood.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from peers.protocol.limits import PeerId, RunId
from peers.protocol.wire import Struct

LAN_GROUP = "239.192.68.76"
"""From the range that routers keep inside a site (RFC 2365)."""
LAN_PORT = 30_068
MAX_LAN_BYTES = 512


class AskLan(Struct, frozen=True, tag="diloco-ask"):
    run_id: RunId
    padding: Annotated[str, Meta(max_length=MAX_LAN_BYTES)] = ""


class HereOnLan(Struct, frozen=True, tag="diloco-here"):
    run_id: RunId
    peer_id: PeerId
    port: Annotated[int, Meta(ge=1, le=65535)]
