"""How a peer asks the coordinator of its run for a world rank; the messages are in peers/protocol/ranks.py."""

from __future__ import annotations

import asyncio
import logging
import time

from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable, ProtocolError, UserError
from peers.net.channel import call
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.protocol.ranks import AskRank, Grant, Taken
from peers.protocol.records import COORDINATOR_KEY, CoordinatorRecord
from peers.protocol.refusal import Refusal, Refused
from peers.timing import ANSWER_S, OFTEN_S, PROBE_S, RETRY_S

MAX_REQUEST_BYTES = 1024

_ANSWER: Decoder[Grant | Taken | Refusal] = Decoder(Grant | Taken | Refusal)

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

    `gate` decides who may be a coordinator (default: anybody), `token` is shown to it. Raises UserError when another
    live peer holds the wanted rank, or the coordinator refuses this one, and no other coordinator grants a rank: in an
    open swarm strangers may claim to be one. Asking again gives the same rank.
    """
    gate = gate or Gate.open(run_id)
    deadline = time.monotonic() + timeout_s
    # A peer with a rank of its own needs no coordinator, and most likely there is none.
    search_until = deadline if wanted is None else time.monotonic() + min(timeout_s, OFTEN_S)
    while time.monotonic() < deadline:
        records = await coordinators(dht, run_id, gate)
        refused: UserError | None = None
        for record in records:
            try:
                # The announcement of a dead coordinator stays in the DHT for a while.
                left_s = min(ANSWER_S, deadline - time.monotonic())
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
        await asyncio.sleep(RETRY_S)
    return None


def protocol_of(run_id: str) -> str:
    return f"diloco/{run_id}/coordinator"


async def coordinators(dht: Dht, run_id: str, gate: Gate) -> list[CoordinatorRecord]:
    """All peers that announce themselves as this run's coordinator and are admitted. Initial peers first, which the
    user has named; then the newest announcement.
    """
    found = await announced(dht, COORDINATOR_KEY(run_id), CoordinatorRecord, run_id, gate.check_record)
    return sorted(found.values(), key=lambda record: (record.peer_id not in dht.initial_peers, -record.time))


async def _ask(
    dht: Dht, record: CoordinatorRecord, wanted: int | None, token: bytes, *, timeout_s: float
) -> Grant:
    protocol = protocol_of(record.run_id)
    with await call(
        dht.transport, record.peer_id, protocol, timeout_s=timeout_s, maddrs=record.maddrs
    ) as channel:
        await channel.send(AskRank(wanted=wanted, token=token), timeout_s)
        # The coordinator may have to ask the holder of the rank first.
        answer = await channel.read(_ANSWER, timeout_s + PROBE_S)
    return granted(answer, wanted)


def granted(answer: Grant | Taken | Refusal, wanted: int | None) -> Grant:
    """Raises UserError for a taken rank, Refused where that is the answer, ProtocolError for a rank of another."""
    match answer:
        case Grant(world_rank) if wanted in (None, world_rank):
            return answer
        case Taken(holder) if wanted is not None:
            raise UserError(
                f"world rank {wanted} is taken by the live peer {holder:.64}; give another --world-rank, or none and "
                "the coordinator assigns one"
            )
        case Refusal(why):
            raise Refused(why)
    raise ProtocolError(f"not an answer to a request for world rank {wanted}: {answer!r:.200}")
