"""Serves the outer state to peers that need it; the messages are those of peers/protocol/states.py.

A donor holds one snapshot per stream, so commits that come meanwhile do not change what it serves. It serves each
joiner on one stream at a time, for no longer than a download may take, and few different states at a time: a snapshot
costs as much memory as the state once a commit comes. Where that is not free, it hands over no state: it would be
killed for lack of memory. If all places are taken, who takes next to nothing loses its place to one that waits. Commits
are handed over beside downloads of the state: who has just downloaded it would otherwise wait for the downloads of
others, and be out of date again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from msgspec.msgpack import Decoder
from torch import Tensor

from peers.core.catch_up import MAX_DONORS
from peers.core.timing import FETCH_S, SHARED_BY, SLOWEST_LINK
from peers.errors import PeersError, ProtocolError
from peers.net.channel import Channel
from peers.net.states.replay import serve_commits
from peers.net.states.transfer import bytes_of
from peers.net.transport import StreamTransport
from peers.protocol.codecs import FLOAT_BYTES
from peers.protocol.states import (
    MAX_MESSAGE_BYTES,
    State,
    Unavailable,
    WantChunk,
    WantCommits,
    WantState,
    state_protocol,
)
from peers.reduce.commit_log import CommitLog
from peers.state.header import StateChunk, chunks_of
from peers.state.outer_state import OuterState, Snapshot
from peers.system import available_memory_bytes
from peers.timing import COMMIT_S, RETRY_S, STALL_S

log = logging.getLogger(__name__)

MAX_DOWNLOADS = SHARED_BY
"""Streams on which a donor sends the state at once, one per joiner, and as many on which it sends commits; further ones
wait."""
MAX_OTHER_HEADS = 2
"""States served at a time. A snapshot of one that is not current any more may cost as much memory as the state."""
LEAST_RATE = SLOWEST_LINK / SHARED_BY / MAX_DONORS
"""Bytes per second of a joiner that shares the slowest link with others, and has as many donors as it may."""
_POLL_S = RETRY_S / 10
_REQUEST: Decoder[WantState | WantCommits] = Decoder(WantState | WantCommits)
_CHUNK = Decoder(WantChunk)


def download_timeout_s(sizes: Sequence[int]) -> float:
    """A joiner's own timeout for a state with fragments of these sizes (core/timing.py), and a little more: a donor
    that gave up first would look faulty."""
    return STALL_S + FETCH_S + SHARED_BY * 2 * FLOAT_BYTES * sum(sizes) / SLOWEST_LINK


class StateServer:
    """The donor. `current` returns the state that this peer holds, if any."""

    def __init__(
        self,
        transport: StreamTransport,
        run_id: str,
        current: Callable[[], OuterState | None],
        commit_log: CommitLog | None = None,
    ) -> None:
        self._transport, self._protocol, self._current = transport, state_protocol(run_id), current
        self._commit_log = commit_log or CommitLog()
        self._slots = {kind: asyncio.Semaphore(MAX_DOWNLOADS) for kind in (WantState, WantCommits)}
        self._newest: dict[str, Channel] = {}
        self._began: dict[Channel, tuple[type[WantState | WantCommits], float]] = {}
        """By stream that has a place: what for, and since when."""
        self._served = Counter[str]()
        """Number of streams, by the head of the state that they carry."""

    async def start(self) -> None:
        """Serve from now on."""
        await self._transport.serve(self._protocol, self._accepted)

    def drop(self, peer_ids: Collection[str]) -> None:
        """Stop serving these peers."""
        for peer_id in self._newest.keys() & set(peer_ids):
            self._newest[peer_id].break_off()

    async def _accepted(self, peer_id: str, sock: socket.socket) -> None:
        channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
        # A joiner that asks again has given up its earlier stream, or was restarted.
        if (older := self._newest.get(peer_id)) is not None:
            older.break_off()
        self._newest[peer_id] = channel
        try:
            await self._serve(channel)
        except (PeersError, TimeoutError) as error:
            log.debug("stopped serving the state to %s: %s", peer_id, error)
        finally:
            if self._newest.get(peer_id) is channel:
                del self._newest[peer_id]
            channel.close()

    async def _serve(self, channel: Channel) -> None:
        """One joiner, until it closes the stream. Raises PeersError, TimeoutError."""
        request = await channel.read(_REQUEST, STALL_S)
        slots = self._slots[type(request)]
        if slots.locked():
            self._break_off_slowest(type(request))
        try:
            async with asyncio.timeout(COMMIT_S):
                await slots.acquire()
        except TimeoutError:
            await channel.send_last(Unavailable(), STALL_S)
            return
        self._began[channel] = type(request), time.monotonic()
        try:
            state = self._current()
            async with asyncio.timeout(download_timeout_s(state.sizes if state is not None else ())):
                await self._answer(request, channel)
        finally:
            del self._began[channel]
            slots.release()

    def _break_off_slowest(self, kind: type[WantState | WantCommits]) -> None:
        """Stop serving the joiner that takes least, if that is far less than a slow link brings it from each of many
        donors. Only once somebody waits for a place, and one for each who does."""

        def rate(channel: Channel) -> float:
            served_s = time.monotonic() - self._began[channel][1] - COMMIT_S - FETCH_S
            return channel.sent_bytes / served_s if served_s > 0 else math.inf

        of_kind = [channel for channel, (what, _) in self._began.items() if what is kind]
        slowest = min(of_kind, key=rate, default=None)
        if slowest is not None and rate(slowest) < LEAST_RATE:
            slowest.break_off()

    async def _answer(self, request: WantState | WantCommits, channel: Channel) -> None:
        if isinstance(request, WantCommits):
            await serve_commits(self._commit_log, request, channel)
        else:
            await self._serve_state(request.head, channel)

    async def _serve_state(self, wanted_head: str, channel: Channel) -> None:
        snapshot = await self._snapshot()
        has_room = False
        if snapshot is not None and wanted_head == snapshot.header.head:
            has_room = self._has_room_for(snapshot)
            if not has_room:
                self._break_off_slowest(WantState)
        if snapshot is None or not has_room:
            head = snapshot.header.head if snapshot else ""
            if snapshot is not None:
                snapshot.close()
            await channel.send_last(Unavailable(head=head), STALL_S)
            return
        self._served[wanted_head] += 1
        try:
            with snapshot, self._commit_log.held(wanted_head):
                await _serve_snapshot(snapshot, channel, self._commit_log)
        finally:
            self._served[wanted_head] -= 1

    def _has_room_for(self, snapshot: Snapshot) -> bool:
        """Whether its state may be served. Free memory that is not known suffices."""
        self._served = +self._served
        if snapshot.header.head in self._served:
            return True
        free, needed = available_memory_bytes(), 2 * FLOAT_BYTES * sum(snapshot.header.sizes)
        if free is not None and free < needed:
            log.info("hands over no state: %d bytes of memory are free, %d may be needed", free, needed)
            return False
        return len(self._served) < MAX_OTHER_HEADS

    async def _snapshot(self) -> Snapshot | None:
        """The current state, once no commit is under way."""
        async with asyncio.timeout(COMMIT_S):
            while (state := self._current()) is not None:
                if (snapshot := state.snapshot()) is not None:
                    return snapshot
                await asyncio.sleep(_POLL_S)
        return None


async def _serve_snapshot(snapshot: Snapshot, channel: Channel, commit_log: CommitLog) -> None:
    header = snapshot.header
    await channel.send(State(), STALL_S)
    await channel.send_bytes(memoryview(header.anchor_chunks + header.momentum_chunks), STALL_S)
    chunks = list(chunks_of(snapshot.header.sizes))
    while True:
        wanted = await channel.read(_CHUNK, COMMIT_S)
        values = bytes_of(_wanted_values(snapshot, chunks, wanted))
        await channel.send_bytes(values, STALL_S)
        commit_log.sent_bytes += len(values)
        # Neither call yields as long as requests are there and small answers fit into the buffers.
        await asyncio.sleep(0)


def _wanted_values(snapshot: Snapshot, chunks: Sequence[StateChunk], wanted: WantChunk) -> Tensor:
    if wanted.position >= len(chunks):
        raise ProtocolError(f"there is no chunk {wanted.position}")
    chunk = chunks[wanted.position]
    fragments = snapshot.anchor if wanted.values == "anchor" else snapshot.momentum
    return fragments[chunk.fragment][chunk.start : chunk.stop]
