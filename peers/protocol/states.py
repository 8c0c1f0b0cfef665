"""How an outer state gets from those who hold it to one who needs it: whole, or by the commits that lead to it.

    joiner                    donor                          protocol diloco/<run_id>/state
    WantState           ->
                        <-    State, digests of all chunks | Unavailable
    WantChunk           ->
                        <-    the chunk's bytes, whose number both know

    WantCommits         ->
                        <-    Commits | Unavailable
    Go                  ->
                        <-    the payloads of all commits, whose number of bytes both know

The joiner has the certificates of what it asks for. The digests must be those that were signed, and every chunk must be
what they say, so chunks may come from any donor, several at once.
"""

from __future__ import annotations

from typing import Literal

from peers.protocol.limits import Count, Hash, HashOrNone
from peers.protocol.wire import Struct

MAX_MESSAGE_BYTES = 64 << 10

Values = Literal["anchor", "momentum"]


def state_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/state"


class WantState(Struct, frozen=True, tag="want state"):
    head: Hash


class State(Struct, frozen=True, tag="state"):
    """The donor holds the state; the digests of its anchor's chunks follow, then those of its momentum's."""


class WantChunk(Struct, frozen=True, tag="want chunk"):
    values: Values
    position: Count


class WantCommits(Struct, frozen=True, tag="want commits"):
    """All commits that lead from one head to the other."""

    since: Hash
    until: Hash


class Commits(Struct, frozen=True, tag="commits"):
    """The donor has recorded them."""

    count: Count


class Go(Struct, frozen=True, tag="go"):
    """The joiner takes the commits from this donor."""


class Unavailable(Struct, frozen=True, tag="unavailable"):
    """What was asked for is not here."""

    head: HashOrNone = ""
    """Of the state that the donor holds."""
