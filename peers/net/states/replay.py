"""A joiner that holds an older state applies the commits made since, from recorded averages.

The messages are those of peers/protocol/states.py. Averages come as they went over the wire, so the outer steps give
the same bits; the joiner checks them against the digests in each commit's certificate. A donor that sends anything else
only wastes time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from msgspec.msgpack import Decoder

from peers.core.timing import SHARED_BY
from peers.errors import PeersError, StateUnavailable
from peers.net.channel import Channel, call
from peers.net.offers import collect_offers
from peers.net.socket_io import closed_on_error
from peers.net.transport import StreamTransport
from peers.protocol.aggregation import Rule
from peers.protocol.certificates import Certificate
from peers.protocol.states import (
    MAX_MESSAGE_BYTES,
    Commits,
    Go,
    Unavailable,
    WantCommits,
    state_protocol,
)
from peers.reduce.commit_log import CommitLog, decoded, parts_of
from peers.state.outer_optimizer import OuterOptimizer
from peers.state.outer_state import OuterState, Snapshot
from peers.timing import COMMIT_S, STALL_S

log = logging.getLogger(__name__)

MAX_COMMITS = 64
_ANSWER: Decoder[Commits | Unavailable] = Decoder(Commits | Unavailable)
_GO = Decoder(Go)

OptimizerFor = Callable[[int], OuterOptimizer]
"""The outer optimizer, by the number of members."""


async def replay_commits(
    donors: Sequence[str],
    transport: StreamTransport,
    run_id: str,
    have: Snapshot,
    path: Sequence[Certificate],
    codec: str,
    rule: Rule,
    optimizer_for: OptimizerFor,
    *,
    timeout_s: float,
) -> OuterState:
    """The state at the end of `path`, from the state `have` and the commits in between. Raises StateUnavailable.

    Most donors have recorded nothing and say so at once. Those that have are tried in turn: a slow one is left for the
    next, and the last is given all the time that remains. Each is asked again in its turn, as no donor waits for long
    to be chosen.
    """
    async with asyncio.timeout(timeout_s):
        offers, _ = await collect_offers({donor: _offer(donor, transport, run_id, path) for donor in donors})
        first = next(iter(offers), "")
        for donor in offers.keys() - {first}:
            offers[donor].close()
        for num_left, donor in zip(reversed(range(len(offers))), offers, strict=True):
            try:
                async with asyncio.timeout(timeout_s / SHARED_BY if num_left else None):
                    offer = offers[donor] if donor == first else await _offer(donor, transport, run_id, path)
                    with offer as channel:
                        return await _replay(channel, have, path, codec, rule, optimizer_for)
            except (PeersError, TimeoutError) as error:
                log.debug("no commits from %s: %s", donor, str(error) or "it is slow")
    raise StateUnavailable("nobody has recorded the commits")


async def _offer(donor: str, transport: StreamTransport, run_id: str, path: Sequence[Certificate]) -> Channel:
    """A channel with a donor that has the commits and waits to be chosen. Raises PeersError."""
    channel = await call(
        transport,
        donor,
        state_protocol(run_id),
        timeout_s=STALL_S,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )
    with closed_on_error(channel):
        await channel.send(WantCommits(since=path[0].plan.parent, until=path[-1].head), STALL_S)
        answer = await channel.read(_ANSWER, COMMIT_S)
        if isinstance(answer, Unavailable) or answer.count != len(path):
            raise StateUnavailable("it has not recorded them")
        return channel


async def _replay(
    channel: Channel,
    have: Snapshot,
    path: Sequence[Certificate],
    codec: str,
    rule: Rule,
    optimizer_for: OptimizerFor,
) -> OuterState:
    """Raises PeersError if what comes does not lead to the certified state."""
    await channel.send(Go(), STALL_S)
    state = OuterState(have.header, have.anchor, have.momentum)
    # Commits must write to other memory: these values belong to the current state.
    kept = state.snapshot()
    assert kept is not None, "nobody else has seen this state yet"
    with kept:
        committing: asyncio.Future[None] | None = None
        try:
            for certificate in path:
                # The next average comes in while the one before is committed.
                average = torch.empty(have.header.sizes[certificate.plan.fragment])
                parts = parts_of(certificate.plan, average.numel(), codec, rule)
                await _receive_average(channel, parts, codec, average)
                if committing is not None:
                    await asyncio.shield(committing)
                committing = asyncio.ensure_future(
                    asyncio.to_thread(_commit, state, certificate, average, optimizer_for)
                )
            assert committing is not None
            await asyncio.shield(committing)
            await asyncio.to_thread(_let_go, state, have)
        finally:
            if committing is not None:
                await asyncio.gather(committing, return_exceptions=True)
    log.info("made %d commits that have come since the download began", len(path))
    return state


def can_be_repeated(have: Snapshot, path: Sequence[Certificate]) -> bool:
    """Whether these certificates, in this order, are commits of the fragments of `have` that directly follow it."""
    parents = [have.header.head, *(certificate.head for certificate in path[:-1])]
    return (
        0 < len(path) <= MAX_COMMITS
        and bool(have.header.head)
        and [certificate.plan.parent for certificate in path] == parents
        and all(certificate.plan.fragment < len(have.header.sizes) for certificate in path)
        and not any(certificate.is_genesis for certificate in path)
    )


async def _receive_average(
    channel: Channel, parts: Iterable[tuple[slice, int]], codec: str, average: torch.Tensor
) -> None:
    values = average.numpy()
    for part, num_bytes in parts:
        payload = np.empty(num_bytes, np.uint8)
        await channel.fill(payload.data, STALL_S)
        await asyncio.to_thread(decoded, codec, part, payload, values)


def _commit(
    state: OuterState, certificate: Certificate, average: torch.Tensor, optimizer_for: OptimizerFor
) -> None:
    plan = certificate.plan
    optimizer_for(len(plan.contributors)).commit(state, plan.fragment, average, certificate=certificate)


def _let_go(state: OuterState, have: Snapshot) -> None:
    """Copy the fragments that no commit has changed: the new state must not share memory with the old one."""
    for own, old in ((state.anchor, have.anchor), (state.momentum, have.momentum)):
        for fragment, values in enumerate(old):
            if own[fragment] is values:
                own[fragment] = values.clone()


async def serve_commits(commit_log: CommitLog, wanted: WantCommits, channel: Channel) -> None:
    """The donor's side, after the request."""
    commits = commit_log.between(wanted.since, wanted.until)[:MAX_COMMITS]
    if not commits or commits[-1].head != wanted.until:
        await channel.send_last(Unavailable(), STALL_S)
        return
    await channel.send(Commits(count=len(commits)), STALL_S)
    await channel.read(_GO, COMMIT_S)
    with commit_log.held(wanted.since):
        for payload in (payload for commit in commits for payload in commit.payloads):
            await channel.send_bytes(payload.data, STALL_S)
            commit_log.sent_bytes += payload.nbytes
        await channel.let_the_other_close()
