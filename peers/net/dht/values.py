"""A record as Hivemind's nodes keep it: msgpack's bytes around ours."""

from __future__ import annotations

from typing import Any

from msgspec.msgpack import Decoder

from peers.errors import ProtocolError
from peers.protocol.wire import decode

MAX_VALUE_BYTES = 4096
"""Larger values are neither stored nor returned."""
_HEAD_BYTES = 8
_VALUE = Decoder(bytes)


def value_in(packed: Any) -> bytes | None:
    """The value of one of our records; None: it is none of them."""
    try:
        return decode(_VALUE, packed, MAX_VALUE_BYTES + _HEAD_BYTES)
    except (ProtocolError, TypeError):
        return None
