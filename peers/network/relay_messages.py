"""What a caller, a relay and the called say to each other before a relayed stream begins: peers/network/relay.py."""

from __future__ import annotations

from typing import Any

from peers.errors import PeerUnreachable, ProtocolError
from peers.messages import Channel

MAX_MESSAGE_BYTES = 1024
ANSWER_TIMEOUT_S = 3.0


def asking(run_id: str) -> str:
    """The protocol on which a relay is asked."""
    return f"diloco/{run_id}/relay"


def delivering(run_id: str) -> str:
    """The protocol on which a relay brings a stream."""
    return f"diloco/{run_id}/relayed"


async def expect(channel: Channel, kind: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """The next message, of this kind. Raises PeerUnreachable where it is a refusal, ProtocolError for any other."""
    message = await channel.receive(timeout_s)
    if message.get("kind") == "no":
        raise PeerUnreachable(f"it says no: {message.get('reason')!r:.80}")
    if message.get("kind") != kind:
        raise ProtocolError(f"expected {kind!r}, got {message.get('kind')!r:.40}")
    return message
