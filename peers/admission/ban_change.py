"""Banning peers and letting them back in, by whoever holds the admission key, from outside the swarm."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.admission import bans
from peers.admission.secrets import AdmissionKey
from peers.core.admission import Admission
from peers.errors import UserError
from peers.net.dht.node import Dht
from peers.net.gate import Gate
from peers.net.identity import load_or_create
from peers.net.socket_directory import SocketDirectory
from peers.protocol.maddrs import is_peer_id
from peers.protocol.tokens import MAX_BANNED, BanList, banned_more

MIN_ENDING_CHARACTERS = 6


@dataclass(frozen=True)
class ChangedBans:
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
) -> ChangedBans:
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
) -> ChangedBans:
    there = await bans.admitted(dht, run_id, gate)
    # What follows has to be newer than any list that the swarm has.
    await bans.exchange(dht, run_id, gate, there)
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
        return ChangedBans(gate.bans, 0, 0, frozenset())
    num_told = await bans.exchange(dht, run_id, gate, there)
    return ChangedBans(gate.bans, num_told, min(len(there), bans.MAX_ASKED), new | back)


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
