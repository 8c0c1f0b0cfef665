"""A joiner that holds a state repeats the commits that have come since, as their members made them.

The messages are those of peers/protocol/states.py. The joiner has the certificates of these commits, so it knows what
every payload must be. The averages come as they went on the wire, so the outer steps give the same bits, and each
certificate's digests show that they do. A donor that sends anything else is found out there, and costs nothing but the
time.
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
from msgspec.msgpack import Decoder

from peers.errors import PeersError, StateUnavailable
from peers.net.channel import Channel
from peers.net.states.transfer import COMMIT_TIMEOUT_S, STALL_TIMEOUT_S, receive_all, send_all
from peers.net.streams import StreamTransport
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

log = logging.getLogger(__name__)

MAX_COMMITS = 64
_GRACE_S = 0.25
_ANSWER: Decoder[Commits | Unavailable] = Decoder(Commits | Unavailable)
_GO = Decoder(Go)

OptimizerFor = Callable[[int], OuterOptimizer]
"""By the number of members."""


async def replay_commits(
    donors: Sequence[str],
    transport: StreamTransport,
    run_id: str,
    have: Snapshot,
    path: Sequence[Certificate],
    codec: str,
    optimizer_for: OptimizerFor,
    *,
    timeout_s: float,
) -> OuterState:
    """The state at the end of `path`, from the one that is here and the commits in between. Raises StateUnavailable.

    Most donors have recorded nothing and say so at once. Those who are slow to say it are not waited for then: what the
    joiner will ask the others for instead may soon be gone.
    """
    offers = {
        asyncio.create_task(_Offer.asked_for(donor, transport, run_id, path)): donor for donor in donors
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
                        return await task.result().replay(have, path, codec, optimizer_for)
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

    channel: Channel
    sock: socket.socket

    @classmethod
    async def asked_for(
        cls, donor: str, transport: StreamTransport, run_id: str, path: Sequence[Certificate]
    ) -> Self:
        """Raises PeersError."""
        sock = await transport.open(donor, state_protocol(run_id), timeout_s=STALL_TIMEOUT_S)
        channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
        try:
            request = WantCommits(since=path[0].plan.parent, until=path[-1].head)
            await channel.send(request, STALL_TIMEOUT_S)
            answer = await channel.read(_ANSWER, COMMIT_TIMEOUT_S)
            if isinstance(answer, Unavailable) or answer.count != len(path):
                raise StateUnavailable("it has not recorded them")
            return cls(channel, sock)
        except BaseException:
            channel.close()
            raise

    async def replay(
        self, have: Snapshot, path: Sequence[Certificate], codec: str, optimizer_for: OptimizerFor
    ) -> OuterState:
        """Raises PeersError, OSError or TimeoutError where what comes does not lead to what is certified."""
        await self.channel.send(Go(), STALL_TIMEOUT_S)
        state = OuterState(have.header, have.anchor, have.momentum)
        # The values belong to the state that is here: commits write beside them.
        kept = state.snapshot()
        assert kept is not None, "nobody else has seen this state yet"
        with kept:
            committing: asyncio.Future[None] | None = None
            try:
                for certificate in path:
                    # The next average comes in while the one before is committed.
                    average = torch.empty(have.header.sizes[certificate.plan.fragment])
                    await _receive_average(self.sock, certificate, codec, average)
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
    """Whether these certificates lead on from the state that is here, one by one, by commits of its fragments."""
    parents = [have.header.head, *(certificate.head for certificate in path[:-1])]
    return (
        0 < len(path) <= MAX_COMMITS
        and bool(have.header.head)
        and [certificate.plan.parent for certificate in path] == parents
        and all(certificate.plan.fragment < len(have.header.sizes) for certificate in path)
        and not any(certificate.is_genesis for certificate in path)
    )


async def _receive_average(
    sock: socket.socket, certificate: Certificate, codec: str, average: torch.Tensor
) -> None:
    values = average.numpy()
    for part, num_bytes in parts_of(certificate.plan, average.numel(), codec):
        payload = np.empty(num_bytes, np.uint8)
        await receive_all(sock, payload.data)
        await asyncio.to_thread(decoded, codec, part, payload, values)


def _commit(
    state: OuterState, certificate: Certificate, average: torch.Tensor, optimizer_for: OptimizerFor
) -> None:
    plan = certificate.plan
    optimizer_for(len(plan.contributors)).commit(state, plan.fragment, average, certificate=certificate)


def _let_go(state: OuterState, have: Snapshot) -> None:
    """Fragments that no commit has changed become its own: who else holds the old state is not to see them change."""
    for own, old in ((state.anchor, have.anchor), (state.momentum, have.momentum)):
        for fragment, values in enumerate(old):
            if own[fragment] is values:
                own[fragment] = values.clone()


async def serve_commits(
    commit_log: CommitLog, wanted: WantCommits, channel: Channel, sock: socket.socket
) -> None:
    """The donor's side, after the request."""
    commits = commit_log.between(wanted.since, wanted.until)[:MAX_COMMITS]
    if not commits or commits[-1].head != wanted.until:
        await channel.send(Unavailable(), STALL_TIMEOUT_S)
        return
    await channel.send(Commits(count=len(commits)), STALL_TIMEOUT_S)
    await channel.read(_GO, COMMIT_TIMEOUT_S)
    for commit in commits:
        for payload in commit.payloads:
            await send_all(sock, payload.data)
