"""All messages of a mesh channel (protocol diloco/<run_id>/mesh).

A channel begins with an introduction of both ends. Each receives the other's ban list before it admits the other:

    caller  -> called    Bans, if it has any; Announced
    called  -> caller    Bans, if it has any; Announced, or Refusal and the end

Then either end sends at any time:

    Announced      its announcement: when rank or manifest change, when it leaves, and at every heartbeat
    Bans           a newer ban list
    WantManifest   a request for
    Manifest       the settings of the run
    Message        a message of the core (messages.py)
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from peers.protocol.admission import Bans
from peers.protocol.limits import ShortText
from peers.protocol.messages import Message
from peers.protocol.records import MAX_RECORD_BYTES
from peers.protocol.refusal import Refusal
from peers.protocol.wire import Struct

MAX_MANIFEST_FIELDS = 256
Scalar = str | int | float | bool | None

WORKER, OWN_WORKER, DILOCOS_WORKER = "worker", "own", "diloco"
"""The manifest's field that says whose program trains, and its values: a user's own, or diloco's trainer."""


class Announced(Struct, frozen=True, tag="announced"):
    record: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]
    """A signed Announcement."""


class WantManifest(Struct, frozen=True, tag="manifest?"):
    pass


class Manifest(Struct, frozen=True, tag="manifest"):
    fields: Annotated[dict[ShortText, Scalar], Meta(max_length=MAX_MANIFEST_FIELDS)]


Introduction = Bans | Announced | Refusal
Carried = Message | WantManifest | Manifest
"""Messages that the mesh passes on to other parts of the daemon."""
Said = Carried | Announced | Bans
