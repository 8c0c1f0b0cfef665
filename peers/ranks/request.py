"""How a peer asks the coordinator of its run for a world rank, and what both may say.

peer                                       coordinator   (protocol diloco/<run_id>/coordinator)
{kind: "rank", wanted: int | None,    ->
 token: bytes}
                                      <-   {kind: "grant", world_rank, fencing, galaxy_size}
                                      <-   {kind: "taken", holder}
                                      <-   {kind: "refused", why}
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, TypeGuard

from peers.access.gate import Gate
from peers.access.request import raise_refusal
from peers.dht import Dht
from peers.errors import PeerUnreachable, ProtocolError, UserError
from peers.messages import Channel
from peers.protocol.limits import MAX_WORLD_RANK
from peers.protocol.records import COORDINATOR_KEY, CoordinatorRecord
from peers.protocol.refusal import Refused
from peers.ranks.ledger import Grant, Taken

HOLDER_TIMEOUT_S = 3.0
"""How long the holder of a rank that another identity wants has to answer before it loses the rank."""
MAX_REQUEST_BYTES = 1024

_RETRY_INTERVAL_S = 0.3
_ASK_TIMEOUT_S = 5.0
_BRIEF_SEARCH_S = 1.0

logger = logging.getLogger(__name__)


async def request_rank(
    dht: Dht,
    run_id: str,
    wanted: int | None,
    *,
    timeout_s: float,
    gate: Gate | None = None,
    token: bytes = b"",
) -> Grant | None:
    """Ask the run's coordinator for a world rank; None when no coordinator answers within `timeout_s`.

    `gate` tells whom to take for a coordinator (default: whoever says so), `token` is shown to it. Raises UserError
    when another live peer holds the wanted rank, or the coordinator refuses this one, and nobody else who says to be a
    coordinator grants one: strangers may say so. Asking again gives the same rank.
    """
    gate = gate or Gate.open(run_id)
    deadline = time.monotonic() + timeout_s
    # With a rank of its own a peer needs no coordinator, and most likely there is none.
    search_until = deadline if wanted is None else time.monotonic() + min(timeout_s, _BRIEF_SEARCH_S)
    while time.monotonic() < deadline:
        records = await coordinators(dht, run_id, gate)
        refused: UserError | None = None
        for record in records:
            try:
                # One that has died is in the DHT for a while.
                left_s = min(_ASK_TIMEOUT_S, deadline - time.monotonic())
                return await _ask(dht, record, wanted, token, timeout_s=left_s)
            except Refused as error:
                refused = refused or UserError(error.why.advice(dht.peer_id))
            except UserError as error:
                refused = refused or error
            except (PeerUnreachable, ProtocolError) as error:
                logger.info("coordinator %s gave no rank: %s", record.peer_id, error)
        if refused is not None:
            raise refused
        if not records and time.monotonic() > search_until:
            break
        await asyncio.sleep(_RETRY_INTERVAL_S)
    return None


def protocol_of(run_id: str) -> str:
    return f"diloco/{run_id}/coordinator"


async def coordinators(dht: Dht, run_id: str, gate: Gate) -> list[CoordinatorRecord]:
    """Everyone who says to be the run's coordinator, and may be: initial peers before those that the user has not
    named, then who said so last."""
    found = []
    for peer_id, blob in (await dht.get(COORDINATOR_KEY(run_id))).items():
        try:
            record = CoordinatorRecord.decode(peer_id, blob, time.time(), run_id=run_id)
            gate.check(peer_id, record.token, "DHT")
            found.append(record)
        except ProtocolError as error:
            logger.debug("ignored: %s", error)
    return sorted(found, key=lambda record: (record.peer_id not in dht.initial_peers, -record.time))


async def _ask(
    dht: Dht, record: CoordinatorRecord, wanted: int | None, token: bytes, *, timeout_s: float
) -> Grant:
    sock = await dht.transport.open(
        record.peer_id, protocol_of(record.run_id), timeout_s=timeout_s, maddrs=record.maddrs
    )
    channel = Channel(sock, max_message_bytes=MAX_REQUEST_BYTES)
    try:
        await channel.send({"kind": "rank", "wanted": wanted, "token": token}, timeout_s)
        # It may have to ask the holder of the rank first.
        answer = await channel.receive(timeout_s + HOLDER_TIMEOUT_S)
    finally:
        channel.close()
    return parse_answer(answer, wanted)


def parse_request(message: dict[str, Any]) -> tuple[int | None, bytes]:
    """The wanted rank, and the token, unchecked. Raises ProtocolError."""
    wanted, token = message.get("wanted"), message.get("token")
    if message.get("kind") != "rank" or not (wanted is None or _is_rank(wanted)):
        raise ProtocolError(f"not a request for a rank: {message!r:.200}")
    if not isinstance(token, bytes):
        raise ProtocolError("a request for a rank without a token, not even an empty one")
    return wanted, token


def to_message(answer: Grant | Taken) -> dict[str, Any]:
    if isinstance(answer, Taken):
        return {"kind": "taken", "holder": answer.holder}
    return {
        "kind": "grant",
        "world_rank": answer.world_rank,
        "fencing": answer.fencing,
        "galaxy_size": answer.galaxy_size,
    }


def parse_answer(message: dict[str, Any], wanted: int | None) -> Grant:
    """Raises UserError for a taken rank, Refused where that is the answer, ProtocolError for what is none."""
    raise_refusal(message)
    if message.get("kind") == "taken" and wanted is not None:
        raise UserError(
            f"world rank {wanted} is taken by the live peer {message.get('holder')!s:.64}; give another --world-rank, "
            "or none and the coordinator assigns one"
        )
    rank, fencing, galaxy_size = (message.get(name) for name in ("world_rank", "fencing", "galaxy_size"))
    named = message.get("kind") == "grant" and wanted in (None, rank)
    if named and _is_rank(rank) and type(fencing) is int and _is_rank(galaxy_size) and galaxy_size > 0:
        return Grant(rank, fencing, galaxy_size)
    raise ProtocolError(f"not an answer to a request for a rank: {message!r:.200}")


def _is_rank(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= MAX_WORLD_RANK
