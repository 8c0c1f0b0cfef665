"""The ban list of a run outside the mesh: its file, and the exchange of lists with peers and coordinators.

The messages are in peers/protocol/admission.py. Within the mesh the list comes with every introduction.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from msgspec.msgpack import Decoder

from peers.admission.token_request import ISSUERS_KEY
from peers.errors import PeersError, ProtocolError
from peers.net.channel import Channel, call
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.net.private_files import write_private
from peers.protocol.admission import Bans
from peers.protocol.limits import MAX_BANS_BYTES
from peers.protocol.records import PEERS_KEY, Announcement, CoordinatorRecord
from peers.timing import PROBE_S

MAX_ASKED = 256
"""Peers that lists are exchanged with directly; the others hear of a newer one from these."""
_MAX_MESSAGE_BYTES = MAX_BANS_BYTES + 100
_BANS = Decoder(Bans)

log = logging.getLogger(__name__)


def bans_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/bans"


def load_into(gate: Gate, path: Path) -> None:
    """Start from the ban list kept at `path`, if there is a valid one."""
    try:
        gate.learn(path.read_bytes()[: MAX_BANS_BYTES + 1])
    except FileNotFoundError:
        return
    except (OSError, ProtocolError) as error:
        log.warning("ignored the ban list %s: %s", path, error)


def keep(gate: Gate, path: Path) -> None:
    """Keep the newest ban list at `path`, so that a restart keeps all bans."""
    try:
        if gate.bans_blob:
            write_private(path, gate.bans_blob)
    except OSError as error:
        log.warning("cannot keep the ban list at %s: %s", path, error.strerror)


async def admitted(dht: Dht, run_id: str, gate: Gate) -> dict[str, Sequence[str]]:
    """The addresses of all admitted peers and issuers, by peer id."""
    issuers = await announced(dht, ISSUERS_KEY(run_id), CoordinatorRecord, run_id, gate.check_quietly)
    peers = await announced(dht, PEERS_KEY(run_id), Announcement, run_id, gate.check_quietly)
    return {peer_id: record.maddrs for peer_id, record in (*issuers.items(), *peers.items())}


async def exchange(dht: Dht, run_id: str, gate: Gate, peers: Mapping[str, Sequence[str]]) -> int:
    """Tell these peers (id -> addresses) the list, and hear theirs. Returns how many have the newest of all now."""

    async def exchange_with(peer_id: str, maddrs: Sequence[str]) -> bytes | None:
        try:
            protocol = bans_protocol(run_id)
            with await call(dht.transport, peer_id, protocol, timeout_s=PROBE_S, maddrs=maddrs) as channel:
                await channel.send(Bans(signed=gate.bans_blob), PROBE_S)
                theirs = await channel.read(_BANS, PROBE_S)
            gate.learn(theirs.signed)
        except PeersError as error:
            log.debug("exchanged no ban list with %s: %s", peer_id, error)
            return None
        return theirs.signed

    asked = islice(peers.items(), MAX_ASKED)
    heard = await asyncio.gather(*(exchange_with(peer_id, maddrs) for peer_id, maddrs in asked))
    return heard.count(gate.bans_blob)


async def serve(dht: Dht, run_id: str, gate: Gate) -> None:
    """Exchange lists from now on, with anybody."""

    async def handle(_peer_id: str, sock: socket.socket) -> None:
        with Channel(sock, max_message_bytes=_MAX_MESSAGE_BYTES) as channel:
            gate.learn((await channel.read(_BANS, PROBE_S)).signed)
            await channel.send_last(Bans(signed=gate.bans_blob), PROBE_S)

    await dht.transport.serve(bans_protocol(run_id), handle)
