"""All messages of a mesh channel (protocol diloco/<run_id>/mesh).

A channel begins with an introduction of both ends. Each receives the other's ban list before it admits the other:

    caller  -> called    Bans, if it has any; Announced
    called  -> caller    Bans, if it has any; Announced, or Refusal and the end

Then either end sends at any time:

    Announced      its announcement, with the status of its core: at every change and heartbeat
    News           announcements of other peers, passed on; only among many peers
    Known          the versions of all announcements that the sender has; the answer is News; only among many peers
    Ping           a request for a Pong, now and then, to measure the round trip
    Pong           the answer, at once
    Parting        this channel is not needed any more
    Bans           a newer ban list
    WantManifest   a request for the settings of the run
    Manifest       the settings of the run
    Directed       a message of its core (messages.py)
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from peers.protocol.admission import Bans
from peers.protocol.limits import Count, PeerId, ShortText
from peers.protocol.messages import Directed
from peers.protocol.records import MAX_SPOKEN_BYTES
from peers.protocol.refusal import Refusal
from peers.protocol.wire import Struct

MAX_MANIFEST_FIELDS = 256
MAX_NEWS = 256
MAX_VERSIONS = 4096
KEY_BYTES = 8
Scalar = str | int | float | bool | None

WORKER, OWN_WORKER, DILOCOS_WORKER = "worker", "own", "diloco"
"""The manifest's field that says whose program trains, and its values: the user's own, or diloco's trainer."""


class Announced(Struct, frozen=True, tag="announced"):
    record: Annotated[bytes, Meta(max_length=MAX_SPOKEN_BYTES)]
    """A signed Spoken (records.py)."""


class Told(Struct, frozen=True):
    """Another peer's announcement. Repeats its version, so that a peer that has it need not decode it."""

    peer_id: PeerId
    incarnation: Count
    number: Count
    record: Annotated[bytes, Meta(max_length=MAX_SPOKEN_BYTES)]


class News(Struct, frozen=True, tag="news"):
    told: Annotated[tuple[Told, ...], Meta(max_length=MAX_NEWS)]


class Known(Struct, frozen=True, tag="known"):
    """Incarnation and number of each newest announcement that the sender has, by the start of the peer id's SHA-256."""

    versions: Annotated[
        dict[Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)], tuple[Count, Count]],
        Meta(max_length=MAX_VERSIONS),
    ]


class Ping(Struct, frozen=True, tag="ping"):
    """Sent only once the last one is answered."""


class Pong(Struct, frozen=True, tag="pong"):
    pass


class Parting(Struct, frozen=True, tag="parting"):
    pass


class WantManifest(Struct, frozen=True, tag="manifest?"):
    pass


class Manifest(Struct, frozen=True, tag="manifest"):
    fields: Annotated[dict[ShortText, Scalar], Meta(max_length=MAX_MANIFEST_FIELDS)]


Introduction = Bans | Announced | Refusal
Carried = Directed | WantManifest | Manifest
"""Messages that the mesh passes on to other parts of the daemon."""
Said = Carried | Announced | News | Known | Ping | Pong | Parting | Bans
