"""Downloads an outer state from peers that hold it; the messages are those of peers/protocol/states.py.

Several donors deliver chunks at once, and what one of them fails to deliver is requested from another. Chunks that the
joiner holds already (of fragments that have not been averaged since) are not requested.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from msgspec.msgpack import Decoder
from torch import Tensor

from peers.errors import PeersError, PeerSilent, PeerUnreachable, ProtocolError, StateUnavailable
from peers.net.channel import Channel, call
from peers.net.transport import StreamTransport
from peers.protocol.certificates import Certificate
from peers.protocol.codecs import FLOAT_BYTES
from peers.protocol.states import (
    MAX_MESSAGE_BYTES,
    State,
    Unavailable,
    Values,
    WantChunk,
    WantState,
    state_protocol,
)
from peers.state.header import DIGEST_BYTES, StateChunk, StateHeader, chunks_of
from peers.state.outer_state import OuterState, Snapshot, digests_of_zeros, hash_chunk, untouched_zeros
from peers.tasks import cancelled
from peers.threads import num_threads
from peers.timing import ANSWER_S, COMMIT_S, OFTEN_S, STALL_S

log = logging.getLogger(__name__)

_LEAST_AHEAD, _MOST_AHEAD = 2, 16
"""Chunks (4 MiB at most) to request from a donor before they are needed: as many as it delivers in OFTEN_S. With fewer,
the round trip limits a fast donor; with more, a slow one would owe much when the others have nothing left to send."""
_NAMES: tuple[Values, ...] = ("anchor", "momentum")
_ANSWER: Decoder[State | Unavailable] = Decoder(State | Unavailable)

Progress = Callable[[int, int], None]
"""Called with the number of bytes received so far, and in total."""


async def download_state(
    donors: Sequence[str],
    transport: StreamTransport,
    run_id: str,
    certificate: Certificate,
    sizes: Sequence[int],
    *,
    timeout_s: float,
    have: Snapshot | None = None,
    progress: Progress | None = None,
) -> OuterState:
    """Download the state of this commit from all these peers at once, and verify every chunk.

    `sizes`: how many values each fragment has. `have`: an older state that this peer holds. Raises StateUnavailable if
    no donor hands the state over in time; its suspects are the donors that broke off. Repeating it is safe.
    """
    zeros = await asyncio.to_thread(digests_of_zeros, sizes)
    download = _Download(certificate, tuple(sizes), zeros, have, progress)
    tasks = {
        donor: asyncio.create_task(download.run(donor, transport, state_protocol(run_id))) for donor in donors
    }
    try:
        async with asyncio.timeout(timeout_s):
            pending = set(tasks.values())
            # One complete answer is enough: do not wait for donors that have not answered.
            while pending and not download.is_complete:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        raise StateUnavailable(
            f"received {download.received_bytes} of {download.total_bytes} bytes in {timeout_s:g} s",
            download.suspects,
        ) from None
    finally:
        await cancelled(tasks.values())
    if not download.is_complete:
        reasons = "; ".join(f"{donor}: {task.result()}" for donor, task in tasks.items() if task.result())
        raise StateUnavailable(
            f"nobody hands over the state {certificate.head[:12]}: {reasons or 'no donors'}",
            download.suspects,
        )
    return download.state()


class _Part(NamedTuple):
    """One chunk of anchor or momentum that is still wanted, and the memory it belongs to."""

    values: Values
    chunk: StateChunk
    target: Tensor
    digest: bytes


class _Download:
    """What has arrived, and what is still to be asked for. Shared by the tasks of all donors."""

    def __init__(
        self,
        certificate: Certificate,
        sizes: tuple[int, ...],
        zeros: Mapping[int, bytes],
        have: Snapshot | None,
        progress: Progress | None,
    ) -> None:
        self._certificate, self._sizes, self._zeros, self._progress = certificate, sizes, zeros, progress
        self._have = have
        self._header: StateHeader | None = None
        self._values = {name: [untouched_zeros(size) for size in sizes] for name in _NAMES}
        self._wanted: deque[_Part] = deque()
        self._num_open = 0
        self._num_idle = 0
        self._beginning, self._changed = asyncio.Lock(), asyncio.Condition()
        self.received_bytes = 0
        self.total_bytes = 0
        self.suspects: set[str] = set()

    @property
    def is_complete(self) -> bool:
        return self._header is not None and not self._wanted and not self._num_open

    def state(self) -> OuterState:
        assert self._header is not None
        return OuterState(self._header, self._values["anchor"], self._values["momentum"])

    async def run(self, donor: str, transport: StreamTransport, protocol: str) -> str:
        """Fetch wanted chunks from this donor until none is left. Returns why the donor was given up; empty if it was
        not.
        """
        try:
            with await call(
                transport, donor, protocol, timeout_s=STALL_S, max_message_bytes=MAX_MESSAGE_BYTES
            ) as channel:
                try:
                    await self._ask_for_state(channel)
                    await self._take_chunks(channel)
                except StateUnavailable:
                    # The donor has committed since, which is no fault.
                    raise
                except PeersError:
                    self.suspects.add(donor)
                    raise
        except PeersError as error:
            log.info("could not fetch the state from %s: %s", donor, error)
            return str(error)
        return ""

    async def _ask_for_state(self, channel: Channel) -> None:
        await channel.send(WantState(head=self._certificate.head), STALL_S)
        # The donor waits for a free slot, and then for a running commit.
        answer = await channel.read(_ANSWER, 2 * COMMIT_S + ANSWER_S)
        if isinstance(answer, Unavailable):
            if answer.head == self._certificate.head:
                raise StateUnavailable(
                    "it serves as many states as it can, or has too little memory for that"
                )
            held = f"it holds the state {answer.head[:12]!r}"
            raise StateUnavailable(held if answer.head else "it holds no state, or serves as many as it can")
        digests = bytearray(2 * DIGEST_BYTES * len(list(chunks_of(self._sizes))))
        await channel.fill(memoryview(digests), STALL_S)
        half = len(digests) // 2
        header = StateHeader(
            sizes=self._sizes, anchor_chunks=bytes(digests[:half]), momentum_chunks=bytes(digests[half:])
        ).certified_by(self._certificate)
        async with self._beginning:
            if self._header is None:
                self._wanted.extend(await asyncio.to_thread(self._parts_to_fetch, header))
                self.total_bytes = FLOAT_BYTES * sum(part.chunk.numel for part in self._wanted)
                # The first valid header says what every chunk must be.
                self._header = header

    def _parts_to_fetch(self, header: StateHeader) -> list[_Part]:
        """Chunks that are neither zero nor present already; the latter are copied into place."""
        parts = [
            _Part(
                name,
                chunk,
                self._values[name][chunk.fragment][chunk.start : chunk.stop],
                _digest_in(header, name, chunk),
            )
            for name in _NAMES
            for chunk in chunks_of(self._sizes)
        ]
        # In several threads: the donor waits for the first request.
        with ThreadPoolExecutor(num_threads(), "own") as pool:
            is_here = pool.map(self._is_here, parts)
            return [part for part, here in zip(parts, is_here, strict=True) if not here]

    def _is_here(self, part: _Part) -> bool:
        # The memory starts as zeros, and so does all momentum.
        if part.digest == self._zeros[part.chunk.numel]:
            return True
        if self._have is None or part.digest != _digest_in(self._have.header, part.values, part.chunk):
            return False
        chunk, own = part.chunk, getattr(self._have, part.values)
        part.target.copy_(own[chunk.fragment][chunk.start : chunk.stop])
        # The state that this peer holds may itself be wrong.
        return not _fault_of(part)

    async def _take_chunks(self, channel: Channel) -> None:
        """Request parts ahead, so that the donor never waits for this peer."""
        asked: deque[_Part] = deque()
        num_ahead = _LEAST_AHEAD
        try:
            while True:
                while len(asked) < num_ahead and (part := await self._next_part(wait=not asked)) is not None:
                    asked.append(part)
                    request = WantChunk(values=part.values, position=part.chunk.position)
                    await channel.send(request, STALL_S)
                if not asked:
                    return
                begun = time.monotonic()
                await self._take(asked[0], channel)
                num_ahead = _num_ahead(time.monotonic() - begun)
                asked.popleft()
                async with self._changed:
                    self._num_open -= 1
                    self._changed.notify_all()
        finally:
            # Another donor may deliver what this one still owes.
            self._wanted.extend(asked)
            self._num_open -= len(asked)
            if asked:
                await self._notify()

    async def _next_part(self, *, wait: bool) -> _Part | None:
        """The next part that nobody was asked for. None: there is none now, or (after waiting) never again."""
        async with self._changed:
            while wait and not self._wanted and self._num_open:
                self._num_idle += 1
                try:
                    await self._changed.wait()
                finally:
                    self._num_idle -= 1
            if not self._wanted:
                return None
            self._num_open += 1
            return self._wanted.popleft()

    async def _take(self, part: _Part, channel: Channel) -> None:
        await self._receive_part(part, channel)
        if fault := await asyncio.to_thread(_fault_of, part):
            raise ProtocolError(f"{part.values} chunk {part.chunk.position} {fault}")
        self.received_bytes += FLOAT_BYTES * part.chunk.numel
        if self._progress is not None:
            self._progress(self.received_bytes, self.total_bytes)

    async def _receive_part(self, part: _Part, channel: Channel) -> None:
        """Raises PeerUnreachable if this takes long and other donors are idle, PeerSilent if nothing comes."""
        view, done = bytes_of(part.target), 0
        begun = moved_at = time.monotonic()
        while done < len(view):
            try:
                done += await channel.receive_bytes(view[done:], ANSWER_S)
                moved_at = time.monotonic()
            except PeerSilent:
                if time.monotonic() - moved_at > STALL_S:
                    raise
            if done < len(view) and self._num_idle and time.monotonic() - begun > ANSWER_S:
                raise PeerUnreachable("it is slow, and other donors are idle")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def _num_ahead(part_s: float) -> int:
    """How many parts to request ahead from a donor whose last one took so long."""
    return min(_MOST_AHEAD, max(_LEAST_AHEAD, int(OFTEN_S / max(part_s, OFTEN_S / _MOST_AHEAD))))


def _digest_in(header: StateHeader, name: Values, chunk: StateChunk) -> bytes:
    digests = header.anchor_chunks if name == "anchor" else header.momentum_chunks
    start = chunk.position * DIGEST_BYTES
    return digests[start : start + DIGEST_BYTES]


def _fault_of(part: _Part) -> str:
    """What is wrong with the values that have come; empty: nothing."""
    if hash_chunk(part.target) != part.digest:
        return "does not match its digest"
    return "" if bool(torch.isfinite(part.target).all()) else "is not finite"


def bytes_of(values: Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data
