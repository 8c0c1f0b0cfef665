"""The reachability protocol: a machine asks a member of the swarm which address it comes from, whether it can be
dialled, and how fast bytes go between the two.

    caller                     asked                          protocol diloco/<run_id>/reach
    Hello                ->
                         <-    Here | Busy | Refusal
    Dial                 ->
                         <-    Dialled
    Speed                ->
                         <-    Burst, and its bytes | Busy
    Got                  ->                                   then another one, twice as long, or at last an empty one
    the same in the other direction
                         <-    Took

No request contains an address: the member dials the host that the caller's own connection comes from. Whoever answers
there has to prove the caller's key (peers/net/paths/greeting.py), so a success means that the caller was reached.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from peers.protocol.limits import Count, Port, Real, ShownText
from peers.protocol.tokens import MAX_TOKEN_BYTES
from peers.protocol.wire import Struct

MAX_MESSAGE_BYTES = 1024
BURSTS = tuple((128 << 10) << power for power in range(6))
"""In bytes. Each is sent when the one before has arrived, so that it takes a slow link a few seconds at most."""


def reach_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/reach"


class Hello(Struct, frozen=True, tag="hello"):
    token: Annotated[bytes, Meta(max_length=MAX_TOKEN_BYTES)]
    """Empty in an open swarm."""


class Here(Struct, frozen=True, tag="here"):
    host: Annotated[str, Meta(pattern=r"^[0-9a-fA-F:.]{0,45}\Z")]
    """The IP address that the caller's connection comes from; empty where a third peer forwards it."""
    time: Real
    """Unix seconds, by the clock of the asked peer."""


class Busy(Struct, frozen=True, tag="busy"):
    """The asked peer has reached its limit for such requests; try later."""


class Dial(Struct, frozen=True, tag="dial"):
    """Dial the caller back."""

    port: Port


class Dialled(Struct, frozen=True, tag="dialled"):
    error: Annotated[ShownText, Meta(max_length=200)]
    """Empty: the caller was reached, and proved its key."""


class Speed(Struct, frozen=True, tag="speed"):
    """Measure the bandwidth in both directions; once per conversation."""


class Burst(Struct, frozen=True, tag="burst"):
    num_bytes: Annotated[int, Meta(ge=0, le=BURSTS[-1])]
    """The bytes that follow; 0: there is no further burst."""


class Got(Struct, frozen=True, tag="got"):
    """The burst has arrived."""


class Took(Struct, frozen=True, tag="took"):
    """The size and duration of the last burst from the caller, as received."""

    num_bytes: Count
    seconds: Real
