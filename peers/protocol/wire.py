"""The wire format of control messages: structs in msgpack, whose types hold the limits (limits.py).

The reader names the structs that may come, as a decoder of their union; anything else is refused before it becomes a
value. How messages are delimited on a stream: net/channel.py.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.msgpack import Decoder

from peers.errors import ProtocolError

T = TypeVar("T")


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable; a message with an unknown field is refused."""


encode = msgspec.msgpack.Encoder().encode


def decode(
    decoder: Decoder[T], blob: bytes | memoryview, most_bytes: int, *, what: str = "message of the swarm"
) -> T:
    """Raises ProtocolError for what is longer than `most_bytes`, or outside the limits of the types."""
    if len(blob) > most_bytes:
        raise ProtocolError(f"a {what} of {len(blob)} bytes; at most {most_bytes} are allowed")
    try:
        return decoder.decode(blob)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # ValidationError, a DecodeError, names the field; ValueError is raised for text that is no UTF-8,
        # RecursionError for a thousand nested arrays. Names of unknown fields were chosen by the peer: repr() removes
        # control characters that a terminal would obey.
        raise ProtocolError(f"not a {what}: {str(error)!r:.200}") from error
