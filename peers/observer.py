"""A look at a swarm from outside: what its peers announce in the DHT, without joining it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from peers import bans
from peers.admission import Admission
from peers.admission_secrets import SwarmSecret
from peers.dht import Dht
from peers.errors import ProtocolError, UserError
from peers.gate import Gate
from peers.identity import load_or_create
from peers.records import PEERS_KEY, Announcement


async def read_swarm(
    run_id: str, initial_peers: Sequence[str], *, timeout_s: float, secret: SwarmSecret | None = None
) -> dict[str, Any]:
    """The swarm's status, as `summary_of` gives it; with the swarm secret, of those only who were admitted.

    Raises UserError when nobody answers in time.
    """
    gate = Gate(Admission(run_id, secret.public_key if secret else None))
    with tempfile.TemporaryDirectory(prefix="diloco-") as directory:
        # Whoever only looks needs no identity that lasts.
        identity = load_or_create(Path(directory) / "observer.key")
        try:
            async with asyncio.timeout(timeout_s):
                dht = await Dht.join(
                    identity=identity, initial_peers=initial_peers, client_mode=True, timeout_s=timeout_s
                )
                try:
                    if not gate.is_open:
                        await bans.exchange_with_dht(dht, run_id, gate)
                    values = await dht.get(PEERS_KEY(run_id))
                finally:
                    await dht.close()
        except TimeoutError as error:
            raise UserError(
                f"the swarm did not answer within {timeout_s:g} s; try a longer --timeout"
            ) from error
    now = time.time()
    found = valid_announcements(values.items(), run_id=run_id, now=now, gate=gate)
    return summary_of(run_id, found, now=now)


def valid_announcements(
    values: Iterable[tuple[str, bytes]], *, run_id: str, now: float, gate: Gate
) -> list[Announcement]:
    """Those of the DHT's values that are well-formed, signed, and of peers admitted to this run."""
    found = []
    for peer_id, blob in values:
        try:
            record = Announcement.decode(peer_id, blob, run_id=run_id, now=now)
            if gate.is_admitted(peer_id, record.token):
                found.append(record)
        except ProtocolError:
            continue
    return found


def summary_of(run_id: str, peers: Iterable[Announcement], *, now: float) -> dict[str, Any]:
    """What `diloco status --json` prints: peers by world rank, `epoch` the highest of those that train."""
    present = sorted((peer for peer in peers if peer.state != "leaving"), key=lambda peer: peer.world_rank)
    return {
        "run_id": run_id,
        "epoch": max((peer.epoch for peer in present), default=0),
        "peers": [
            {
                "peer_id": peer.peer_id,
                "world_rank": peer.world_rank,
                "state": peer.state,
                "epoch": peer.epoch,
                "step": peer.step,
                "anchor_digest": peer.anchor_digest,
                "lineage": peer.lineage,
                "committed_tokens": peer.committed_tokens,
                "tokens_per_s": peer.tokens_per_s,
                "last_seen_s": max(0.0, now - peer.time),
                "maddrs": list(peer.maddrs),
                "endpoints": list(peer.endpoints),
                # As this peer says of its own streams, by the world rank of the other end.
                "paths": {str(rank): path for rank, path in peer.paths},
            }
            for peer in present
        ],
    }
