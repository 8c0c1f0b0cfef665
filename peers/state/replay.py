"""A joiner that holds a state makes the commits that have come since, as their members did.

    joiner                                donor                  protocol diloco/<run_id>/state
    commits {since, until}           ->
                                     <-   commits {commits: [header, …]} | unavailable
    go                               ->
                                     <-   all their payloads

The averages come as they went on the wire, so the outer steps give the same bits, and the lineage at the end shows that
they do: it is over every value of the state. A donor that sends anything else is found out there, and costs nothing but
the time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from peers.errors import PeersError, ProtocolError, StateUnavailable
from peers.messages import Channel
from peers.network.streams import StreamTransport
from peers.outer_optimizer import OuterOptimizer
from peers.outer_state import OuterState, Snapshot
from peers.state.commit_log import CommitHeader, CommitLog, decoded
from peers.state.transfer import (
    COMMIT_TIMEOUT_S,
    MAX_MESSAGE_BYTES,
    STALL_TIMEOUT_S,
    receive_all,
    send_all,
    state_protocol,
)

log = logging.getLogger(__name__)

MAX_COMMITS = 64
_GRACE_S = 0.25

OptimizerFor = Callable[[int], OuterOptimizer]
"""By the number of members."""


async def replay_commits(
    donors: Sequence[str],
    transport: StreamTransport,
    run_id: str,
    have: Snapshot,
    lineage: str,
    optimizer_for: OptimizerFor,
    *,
    timeout_s: float,
) -> OuterState:
    """The state of this lineage, from one that is here and the commits in between. Raises StateUnavailable.

    Most donors have recorded nothing and say so at once. Those who are slow to say it are not waited for then: what the
    joiner will ask the others for instead may soon be gone.
    """
    offers = {
        asyncio.create_task(_Offer.asked_for(donor, transport, run_id, have, lineage)): donor
        for donor in donors
    }
    pending, patience_s = set(offers), timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                for task in done:
                    try:
                        return await task.result().replay(have, optimizer_for)
                    except (PeersError, OSError, TimeoutError) as error:
                        log.debug("no commits from %s: %s", offers[task], error)
                patience_s = _GRACE_S
    finally:
        for task in offers:
            task.cancel()
        for offer in await asyncio.gather(*offers, return_exceptions=True):
            if isinstance(offer, _Offer):
                offer.channel.close()
    raise StateUnavailable("nobody has recorded the commits")


@dataclass
class _Offer:
    """A donor that has the commits, and waits to hear that they are wanted of it."""

    headers: list[CommitHeader]
    channel: Channel
    sock: socket.socket

    @classmethod
    async def asked_for(
        cls, donor: str, transport: StreamTransport, run_id: str, have: Snapshot, lineage: str
    ) -> Self:
        """Raises PeersError."""
        sock = await transport.open(donor, state_protocol(run_id), timeout_s=STALL_TIMEOUT_S)
        channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
        try:
            request = {"kind": "commits", "since": have.header.lineage, "until": lineage}
            await channel.send(request, timeout_s=STALL_TIMEOUT_S)
            message = await channel.receive(timeout_s=COMMIT_TIMEOUT_S)
            if message.get("kind") != "commits":
                raise StateUnavailable("it has not recorded them")
            return cls(_headers(message.get("commits"), have, lineage), channel, sock)
        except BaseException:
            channel.close()
            raise

    async def replay(self, have: Snapshot, optimizer_for: OptimizerFor) -> OuterState:
        """Raises PeersError, OSError or TimeoutError where what comes is not what was announced."""
        await self.channel.send({"kind": "go"}, timeout_s=STALL_TIMEOUT_S)
        state = OuterState(have.header, have.anchor, have.momentum)
        # The values belong to the state that is here: commits write beside them.
        kept = state.snapshot()
        assert kept is not None, "nobody else has seen this state yet"
        with kept:
            committing: asyncio.Future[None] | None = None
            try:
                for header in self.headers:
                    # The next average comes in while the one before is committed.
                    average = torch.empty(have.header.sizes[header.fragment])
                    await _receive_average(self.sock, header, average)
                    if committing is not None:
                        await asyncio.shield(committing)
                    committing = asyncio.ensure_future(
                        asyncio.to_thread(_commit, state, header, average, optimizer_for)
                    )
                assert committing is not None
                await asyncio.shield(committing)
            finally:
                if committing is not None:
                    await asyncio.gather(committing, return_exceptions=True)
        log.info("made %d commits that have come since the download began", len(self.headers))
        return state


def _headers(value: object, have: Snapshot, lineage: str) -> list[CommitHeader]:
    """A chain from the state that is here to the lineage that is wanted. Raises ProtocolError."""
    if not isinstance(value, list) or not 0 < len(value) <= MAX_COMMITS:
        raise ProtocolError(f"not a list of commits: {value!r:.80}")
    if not all(isinstance(item, dict) for item in value):
        raise ProtocolError(f"not headers of commits: {value!r:.80}")
    headers = [CommitHeader.from_message(item, have.header.sizes) for item in value]
    parents = [have.header.lineage, *(header.lineage for header in headers[:-1])]
    if [header.parent for header in headers] != parents or headers[-1].lineage != lineage:
        raise ProtocolError("commits that do not lead from the state here to the one that is wanted")
    return headers


async def _receive_average(sock: socket.socket, header: CommitHeader, average: torch.Tensor) -> None:
    values = average.numpy()
    for part, num_bytes in header.parts():
        payload = np.empty(num_bytes, np.uint8)
        await receive_all(sock, payload.data)
        await asyncio.to_thread(decoded, header, part, payload, values)


def _commit(
    state: OuterState, header: CommitHeader, average: torch.Tensor, optimizer_for: OptimizerFor
) -> None:
    optimizer = optimizer_for(header.num_members)
    optimizer.commit(state, header.fragment, average, tokens=header.tokens, data_width=header.data_width)
    if state.lineage != header.lineage:
        raise ProtocolError("sent a commit that does not lead to the lineage it names")


async def serve_commits(
    commit_log: CommitLog, since: object, until: object, channel: Channel, sock: socket.socket
) -> None:
    """The donor's side, after the request."""
    commits = commit_log.between(str(since), str(until))[:MAX_COMMITS]
    if not commits or commits[-1].header.lineage != until:
        await channel.send({"kind": "unavailable", "lineage": ""}, timeout_s=STALL_TIMEOUT_S)
        return
    headers = [commit.header.to_message() for commit in commits]
    await channel.send({"kind": "commits", "commits": headers}, timeout_s=STALL_TIMEOUT_S)
    if (await channel.receive(timeout_s=COMMIT_TIMEOUT_S)).get("kind") != "go":
        raise ProtocolError("asked for commits, and then for something else")
    for commit in commits:
        for payload in commit.payloads:
            await send_all(sock, payload.data)
