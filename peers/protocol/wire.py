"""The one decoder for what a peer sends: msgpack into a struct, whose types hold the limits (limits.py).

Whoever reads says which structs may come, as a decoder of their union; anything else never becomes a value.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.msgpack import Decoder

from peers.errors import ProtocolError

T = TypeVar("T")


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable; a message with a field that is not ours is refused."""


encode = msgspec.msgpack.Encoder().encode


def decode(
    decoder: Decoder[T], blob: bytes | memoryview, most_bytes: int, *, what: str = "message of the swarm"
) -> T:
    """Raises ProtocolError for what is longer, or outside the limits of the types."""
    if len(blob) > most_bytes:
        raise ProtocolError(f"a {what} of {len(blob)} bytes; at most {most_bytes} are allowed")
    try:
        return decoder.decode(blob)
    except (msgspec.DecodeError, ValueError) as error:
        # ValidationError, of a DecodeError, names the field; ValueError is for text that is no UTF-8. The names of
        # unknown fields are the peer's own words: repr() leaves nothing in them that a terminal obeys.
        raise ProtocolError(f"not a {what}: {str(error)!r:.200}") from error
