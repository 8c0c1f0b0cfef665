"""Banning peers and letting them back in, by whoever holds the admission key, from outside the swarm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.access import bans
from peers.access.gate import Gate
from peers.access.request import ISSUERS_KEY
from peers.access.secrets import AdmissionKey
from peers.access.tokens import MAX_BANNED, BanList, banned_more
from peers.admission import Admission
from peers.dht import Dht
from peers.errors import ProtocolError, UserError
from peers.identity import load_or_create
from peers.network.maddrs import is_peer_id
from peers.network.socket_directory import SocketDirectory
from peers.protocol.records import PEERS_KEY, Announcement, CoordinatorRecord

MAX_TOLD = 256
"""Peers that are told of a new list directly; the others hear of it from these, and from the DHT."""
MIN_ENDING_CHARACTERS = 6


@dataclass(frozen=True)
class Outcome:
    """The list that holds now, and how many of the peers that were asked have it."""

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
) -> Outcome:
    """Sign the next ban list, keep it at `kept_at`, and see to it that the swarm has it.

    `ban` and `unban` are peer ids, or endings that mean one peer of the swarm, or of the list. Without either, the list
    as it is. Raises UserError.
    """
    gate = Gate(Admission(run_id, key.secret.public_key))
    bans.load_into(gate, kept_at)
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
) -> Outcome:
    await bans.exchange_with_dht(dht, run_id, gate)
    there = await _admitted(dht, run_id, gate)
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
    bans.keep(gate, kept_at)
    if not gate.bans_blob:
        return Outcome(gate.bans, 0, 0, frozenset())
    await bans.exchange_with_dht(dht, run_id, gate)
    asked = list(there.items())[:MAX_TOLD]
    told = await bans.push(dht, run_id, gate, asked)
    return Outcome(gate.bans, len(told), len(asked), new | back)


async def _admitted(dht: Dht, run_id: str, gate: Gate) -> dict[str, Sequence[str]]:
    """The addresses of all admitted peers and issuers, by peer id."""
    found: dict[str, Sequence[str]] = {}
    now = time.time()
    for key, kind in ((ISSUERS_KEY(run_id), CoordinatorRecord), (PEERS_KEY(run_id), Announcement)):
        for peer_id, blob in (await dht.get(key)).items():
            try:
                record: CoordinatorRecord | Announcement = kind.decode(peer_id, blob, now, run_id=run_id)
            except ProtocolError:
                continue
            if gate.is_admitted(peer_id, record.token):
                found[peer_id] = record.maddrs
    return found


def resolved(text: str, known: Collection[str]) -> str:
    """The peer id that is meant by itself or by its ending. Raises UserError."""
    if is_peer_id(text):
        return text
    meant = [peer_id for peer_id in known if peer_id.endswith(text)]
    if len(text) < MIN_ENDING_CHARACTERS or len(meant) != 1:
        what = "means none" if not meant else "could mean several"
        raise UserError(
            f"{text!r:.80} {what} of the {len(known)} peers it could be; give the whole peer id, as `diloco status "
            f"--json` has it, or {MIN_ENDING_CHARACTERS} or more of its last characters"
        )
    return meant[0]
