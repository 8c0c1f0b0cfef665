"""How a ban list gets about: kept in the DHT, passed on over the mesh, and told directly by whoever has made it.

    anybody                           peer or coordinator    (protocol diloco/<run_id>/bans)
    {kind: "bans", bans}      ->
                              <-      {kind: "heard", version}

The list is believed for its signature, so it matters nothing who brings it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from peers.access.gate import Gate
from peers.access.tokens import MAX_BANS_BYTES
from peers.dht import Dht
from peers.errors import PeersError, ProtocolError
from peers.messages import Channel
from peers.private_files import write_private

TTL_S = 600.0
"""In the DHT; whoever misses the list there puts it back."""
MAX_LOOKED_AT = 64
"""Values under the key in the DHT that are looked at: anybody can put more there."""
_MAX_MESSAGE_BYTES = MAX_BANS_BYTES + 100
_ANSWER_TIMEOUT_S = 3.0

log = logging.getLogger(__name__)


def bans_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/bans"


def BANS_KEY(run_id: str) -> str:
    """The DHT key of a run's ban lists; the subkeys are versions."""
    return f"diloco/{run_id}/bans"


def to_message(blob: bytes) -> dict[str, Any]:
    return {"kind": "bans", "bans": blob}


def parse(message: dict[str, Any]) -> bytes:
    """The signed list, unchecked. Raises ProtocolError."""
    blob = message.get("bans")
    if message.get("kind") != "bans" or not isinstance(blob, bytes) or len(blob) > MAX_BANS_BYTES:
        raise ProtocolError(f"expected a ban list, got {message.get('kind')!r:.40}")
    return blob


def load_into(gate: Gate, path: Path) -> None:
    """Start from the list that was kept at `path`, if that is one."""
    try:
        gate.learn(path.read_bytes()[:_MAX_MESSAGE_BYTES])
    except FileNotFoundError:
        return
    except (OSError, ProtocolError) as error:
        log.warning("ignored the ban list %s: %s", path, error)


def keep(gate: Gate, path: Path) -> None:
    """Keep the newest list at `path`, so that a restart forgets nobody."""
    try:
        if gate.bans_blob:
            write_private(path, gate.bans_blob)
    except OSError as error:
        log.warning("cannot keep the ban list at %s: %s", path, error.strerror)


async def exchange_with_dht(dht: Dht, run_id: str, gate: Gate) -> None:
    """Learn of newer lists, and put ours back where it is not to be found any more."""
    values = await dht.get(BANS_KEY(run_id))
    newer = [blob for subkey, blob in values.items() if _version(subkey) >= gate.bans.version]
    for blob in random.sample(newer, min(len(newer), MAX_LOOKED_AT)):
        try:
            gate.learn(blob)
        except ProtocolError as error:
            log.debug("ignored: %s", error)
    if gate.bans_blob and gate.bans_blob not in values.values():
        await dht.store(BANS_KEY(run_id), str(gate.bans.version), gate.bans_blob, TTL_S)


async def push(dht: Dht, run_id: str, gate: Gate, peers: Collection[tuple[str, Sequence[str]]]) -> list[str]:
    """Tell the list to these peers (id, addresses) directly. Returns the ids of those that have it now."""

    async def tell(peer_id: str, maddrs: Sequence[str]) -> bool:
        try:
            sock = await dht.transport.open(
                peer_id, bans_protocol(run_id), timeout_s=_ANSWER_TIMEOUT_S, maddrs=maddrs
            )
            channel = Channel(sock, max_message_bytes=_MAX_MESSAGE_BYTES)
            try:
                await channel.send(to_message(gate.bans_blob), _ANSWER_TIMEOUT_S)
                answer = await channel.receive(_ANSWER_TIMEOUT_S)
            finally:
                channel.close()
        except PeersError as error:
            log.debug("could not tell %s of the ban list: %s", peer_id, error)
            return False
        return answer.get("version") == gate.bans.version

    told = await asyncio.gather(*(tell(peer_id, maddrs) for peer_id, maddrs in peers))
    return [peer_id for (peer_id, _), heard in zip(peers, told, strict=True) if heard]


async def serve(dht: Dht, run_id: str, gate: Gate) -> None:
    """Take lists from now on, from anybody."""

    async def handle(_peer_id: str, sock: socket.socket) -> None:
        channel = Channel(sock, max_message_bytes=_MAX_MESSAGE_BYTES)
        try:
            gate.learn(parse(await channel.receive(_ANSWER_TIMEOUT_S)))
            await channel.send({"kind": "heard", "version": gate.bans.version}, _ANSWER_TIMEOUT_S)
        finally:
            channel.close()

    await dht.transport.serve(bans_protocol(run_id), handle)


def _version(subkey: str) -> int:
    return int(subkey) if subkey.isascii() and subkey.isdigit() and len(subkey) < 20 else -1
