"""The ban list of a run outside the mesh: its file, its exchange with peers and coordinators, and changes to it with
the admission key.

The messages are in peers/protocol/admission.py. Within the mesh, every introduction carries the list.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from msgspec.msgpack import Decoder

from peers.admission.secrets import AdmissionKey
from peers.errors import PeersError, ProtocolError, UserError
from peers.net.channel import Channel, call
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.net.identity import load_or_create
from peers.net.private_files import write_private
from peers.net.socket_directory import SocketDirectory
from peers.protocol.admission import Bans, bans_protocol
from peers.protocol.limits import MAX_BANS_BYTES
from peers.protocol.maddrs import is_peer_id
from peers.protocol.records import ISSUERS_KEY, PEERS_KEY, Announcement, CoordinatorRecord
from peers.protocol.tokens import MAX_BANNED, BanList, banned_more
from peers.timing import PROBE_S

log = logging.getLogger(__name__)

MAX_ASKED = 256
"""Peers that lists are exchanged with directly; the others hear of a newer one from these."""
_MAX_MESSAGE_BYTES = MAX_BANS_BYTES + 100
_BANS = Decoder(Bans)


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
    """Exchange ban lists with these peers (id -> addresses). Returns how many of them now hold the newest one."""

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
    """From now on, exchange ban lists with every peer that asks."""

    async def handle(_peer_id: str, sock: socket.socket) -> None:
        with Channel(sock, max_message_bytes=_MAX_MESSAGE_BYTES) as channel:
            gate.learn((await channel.read(_BANS, PROBE_S)).signed)
            await channel.send_last(Bans(signed=gate.bans_blob), PROBE_S)

    await dht.transport.serve(bans_protocol(run_id), handle)


MIN_ENDING_CHARACTERS = 6


@dataclass(frozen=True)
class ChangedBans:
    """The ban list that is now valid, and how many of the peers asked hold it."""

    bans: BanList
    num_told: int
    num_asked: int
    changed: frozenset[str]


async def change_bans(
    run_id: str,
    initial_peers: Sequence[str],
    key: AdmissionKey,
    kept_at: Path,
    *,
    ban: Collection[str] = (),
    unban: Collection[str] = (),
    timeout_s: float,
) -> ChangedBans:
    """Sign the next ban list, keep it at `kept_at`, and spread it in the swarm.

    `ban`: peer ids, or endings that fit only one peer of the swarm. `unban`: likewise, for peers on the list. Without
    either, the current list is spread. Raises UserError.
    """
    gate = Gate(run_id, key.secret.public_key)
    load_into(gate, kept_at)
    with SocketDirectory() as directory:
        identity = load_or_create(directory.path / "admission.key")
        try:
            async with asyncio.timeout(timeout_s):
                dht = await Dht.join(
                    identity=identity, initial_peers=initial_peers, client_mode=True, timeout_s=timeout_s
                )
                try:
                    return await _change(dht, run_id, gate, key, kept_at, ban, unban)
                finally:
                    await dht.close()
        except TimeoutError as error:
            raise UserError(
                f"the swarm did not answer within {timeout_s:g} s; try a longer --timeout"
            ) from error


async def _change(
    dht: Dht,
    run_id: str,
    gate: Gate,
    key: AdmissionKey,
    kept_at: Path,
    ban: Collection[str],
    unban: Collection[str],
) -> ChangedBans:
    there = await admitted(dht, run_id, gate)
    # The next list has to be newer than any list in the swarm.
    await exchange(dht, run_id, gate, there)
    new = frozenset(resolved(text, there) for text in ban) - gate.bans.peer_ids
    back = frozenset(resolved(text, gate.bans.peer_ids) for text in unban) & gate.bans.peer_ids
    if new or back:
        try:
            gate.learn(banned_more(gate.bans, ban=new, unban=back).encode(key.private_key))
        except ValueError as error:
            raise UserError(
                f"a ban list holds at most {MAX_BANNED} peers. `diloco peers new-secret` shuts out everybody who has "
                "only the old secret, once their tokens end"
            ) from error
    keep(gate, kept_at)
    if not gate.bans_blob:
        return ChangedBans(gate.bans, 0, 0, frozenset())
    num_told = await exchange(dht, run_id, gate, there)
    return ChangedBans(gate.bans, num_told, min(len(there), MAX_ASKED), new | back)


def resolved(text: str, known: Collection[str]) -> str:
    """`text` itself if it is a peer id, else the known peer id that ends with it. Raises UserError."""
    if is_peer_id(text):
        return text
    meant = [peer_id for peer_id in known if peer_id.endswith(text)]
    if len(text) < MIN_ENDING_CHARACTERS or len(meant) != 1:
        what = "could mean several peers" if meant else "means no peer"
        raise UserError(
            f"{text!r:.80} {what}; give the whole peer id, as `diloco status --json` has it, or "
            f"{MIN_ENDING_CHARACTERS} or more of its last characters"
        )
    return meant[0]
