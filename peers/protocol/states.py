"""The state transfer protocol: how a joiner gets an outer state from donors, whole or by the commits that lead to it.

    joiner                    donor                          protocol diloco/<run_id>/state
    WantState           ->
                        <-    State, digests of all chunks | Unavailable
    WantChunk           ->
                        <-    the chunk's bytes; both ends know their number

    WantCommits         ->
                        <-    Commits | Unavailable
    Go                  ->
                        <-    the payloads of all commits; both ends know their number of bytes

The joiner holds the certificates of what it asks for. It verifies the digests against the certificate, and every chunk
against its digest, so chunks may come from any donors, in parallel.
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
    """The donor holds the state. The digests of the anchor's chunks follow, then those of the momentum's."""


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
    """The joiner wants the commits from this donor."""


class Unavailable(Struct, frozen=True, tag="unavailable"):
    """The donor does not have what was asked for, or serves as many joiners as it can."""

    head: HashOrNone = ""
    """Head of the state that the donor holds."""
