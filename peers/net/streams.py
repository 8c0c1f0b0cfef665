"""Streams for the reduction's bytes, kept open across rounds: a new one costs round trips.

Every peer sends on the streams it has opened and receives on those opened to it. At the start of a round the sender
names the attempt on each outgoing stream; the other side reads that name from the idle stream and hands the stream to
whoever awaits the attempt. After a clean round the streams are idle again; after a failed one they are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peers.errors import PeersError, RoundFailed
from peers.net import socket_io
from peers.net.paths.paths import Paths
from peers.net.transport import StreamTransport
from peers.reduce.frames import HEADER, NOBODY, Kind, is_silent, slice_s
from peers.reduce.plan import ATTEMPT_BYTES
from peers.tasks import cancelled
from peers.timing import ANSWER_S, CONNECT_S, OFTEN_S

log = logging.getLogger(__name__)

MAX_IDLE_PER_PEER = 2
"""Idle incoming streams per peer, and likewise streams that have named an attempt; the oldest is closed."""
MAX_IDLE_PEERS = 256
"""Peers whose idle streams are kept. A peer that takes part in a round moves to the end of the list, so strangers that
only open streams are closed first."""
MAX_OPENING = 2
"""Streams that are opened at a time while no round waits. If all were opened at once, on a busy machine no handshake
would end within the head start of the direct path, and libp2p would be dialled for each peer, too.
"""
_MUCH_OF_IT = 0.1
"""The last share of the time for streams, in which a peer that is still missing counts as silent: all members give up
at about the same time, and this peer may be a little late."""


@dataclass(frozen=True)
class RoundStreams:
    """The streams of one attempt by world rank: blocking sockets, for threads."""

    peer_ids: Mapping[int, str]
    send: Mapping[int, socket.socket]
    receive: Mapping[int, socket.socket]


class StreamPool:
    """Used from one event loop; the sockets it hands out are blocking, for threads.

    With a `choice` of paths, a kept stream is replaced between rounds by one on a better path.
    """

    def __init__(self, transport: StreamTransport, protocol: str, choice: Paths | None = None) -> None:
        self._transport, self._protocol, self._choice = transport, protocol, choice
        self._outgoing: dict[str, socket.socket] = {}
        # In the background, while no round waits: a first stream, or a better one.
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._openers = asyncio.Semaphore(MAX_OPENING)
        self._idle: defaultdict[str, dict[socket.socket, asyncio.Task[bytes]]] = defaultdict(dict)
        self._named: dict[tuple[bytes, str], socket.socket] = {}
        self._awaited: dict[tuple[bytes, str], asyncio.Future[socket.socket]] = {}

    async def start(self) -> None:
        """Accept streams from now on."""
        await self._transport.serve(self._protocol, self._accepted)

    def open_ahead(self, peer_id: str) -> None:
        """This peer is likely to be in the next round: open a stream to it, unless there is one."""
        if peer_id not in self._outgoing:
            self._open_in_background(
                peer_id, lambda: self._transport.open(peer_id, self._protocol, timeout_s=CONNECT_S)
            )

    async def connect(
        self,
        attempt: bytes,
        peer_ids: Mapping[int, str],
        *,
        timeout_s: float,
        prompt_s: float = math.inf,
        cancelled: threading.Event | None = None,
        quiet: Callable[[], Collection[int]] = frozenset,
        members: Sequence[int] = (),
    ) -> RoundStreams:
        """One outgoing and one incoming stream with each of these peers (by world rank), for this attempt.

        Raises RoundFailed with the peers at fault: at once if peers cannot be reached; after `prompt_s`, if they have
        an idle stream to this peer and do not name the attempt on it; if they become `quiet` meanwhile; after
        `timeout_s`, if they are still missing. Time for which this process was stopped does not count. Also raises it
        soon after `cancelled`. Streams with the other peers are then closed, after a frame that clears them of blame
        and names the culprit, if there is one, by its place among the world ranks of all `members`.
        """
        prompt = {rank: peer for rank, peer in peer_ids.items() if self._idle.get(peer)}
        outgoing: dict[int, asyncio.Future[socket.socket]] = {
            rank: asyncio.create_task(self._name_outgoing(attempt, peer, timeout_s))
            for rank, peer in peer_ids.items()
        }
        incoming = {rank: self._await_incoming(attempt, peer) for rank, peer in peer_ids.items()}
        try:
            await self._gather(outgoing, incoming, timeout_s, (prompt, prompt_s), cancelled, quiet)
        except BaseException as error:
            if isinstance(error, RoundFailed):
                self._miss(peer_ids, error.silent)
            suspects = error.suspects if isinstance(error, RoundFailed) else ()
            known = [index for index, rank in enumerate(members) if rank in suspects]
            culprit = known[0] if len(known) == 1 else NOBODY
            others = [future for rank, future in outgoing.items() if rank not in suspects]
            await _give_up(others, farewell=HEADER.pack(Kind.ABORT, culprit, 0))
            # To the suspects themselves, this peer has just left.
            late = [future for rank, future in outgoing.items() if rank in suspects]
            await _give_up(late, farewell=HEADER.pack(Kind.ABORT, NOBODY, 0))
            await _give_up([*incoming.values()])
            raise
        finally:
            for peer in peer_ids.values():
                self._awaited.pop((attempt, peer), None)
        streams = RoundStreams(
            peer_ids,
            {rank: future.result() for rank, future in outgoing.items()},
            {rank: future.result() for rank, future in incoming.items()},
        )
        for sock in (*streams.send.values(), *streams.receive.values()):
            sock.setblocking(True)
        return streams

    def give_back(self, streams: RoundStreams, *, sent_bytes: int = 0, seconds: float = 0.0) -> None:
        """Keep the streams of a clean round for the next one. They have sent `sent_bytes` in total, in `seconds`."""
        for rank, peer in streams.peer_ids.items():
            outgoing, incoming = streams.send[rank], streams.receive[rank]
            outgoing.setblocking(False)
            incoming.setblocking(False)
            if self._choice is not None:
                self._choice.used(peer, outgoing, sent_bytes / len(streams.peer_ids), seconds)
            if peer in self._outgoing:
                # A better stream has been opened meanwhile.
                outgoing.close()
            else:
                self._outgoing[peer] = outgoing
                self._improve(peer, outgoing)
            self._watch(peer, incoming)

    def discard(
        self, streams: RoundStreams, suspects: Iterable[int] = (), silent: Iterable[int] = ()
    ) -> None:
        """Close the streams of a failed round, which may still hold bytes of it.

        `suspects`: the peers that this peer itself saw fail. Their path may be at fault, so the next streams to them
        take another one. `silent`: the peers from which nothing had come.
        """
        self._miss(streams.peer_ids, silent)
        if self._choice is not None:
            for rank in set(suspects) & streams.send.keys():
                self._choice.failed(streams.peer_ids[rank], streams.send[rank])
        for sock in (*streams.send.values(), *streams.receive.values()):
            sock.close()

    def _miss(self, peer_ids: Mapping[int, str], silent: Iterable[int]) -> None:
        if self._choice is not None:
            for rank in silent:
                self._choice.no_answer(peer_ids[rank])

    def drop(self, peer_id: str) -> None:
        """Close every stream with a lost peer, except those in a round."""
        if (outgoing := self._outgoing.pop(peer_id, None)) is not None:
            outgoing.close()
        if (task := self._opening.get(peer_id)) is not None:
            task.cancel()
        for reading in self._idle.pop(peer_id, {}).values():
            reading.cancel()
        for key in [key for key in self._named if key[1] == peer_id]:
            self._named.pop(key).close()

    async def close(self) -> None:
        """Close every stream that is not in a round."""
        tasks: list[asyncio.Task[Any]] = [
            task for watched in self._idle.values() for task in watched.values()
        ]
        tasks += self._opening.values()
        named_by = {peer for _, peer in self._named}
        for peer in {*self._outgoing, *self._opening, *self._idle, *named_by}:
            self.drop(peer)
        await asyncio.gather(*tasks, return_exceptions=True)

    # Outgoing

    async def _gather(
        self,
        outgoing: Mapping[int, asyncio.Future[socket.socket]],
        incoming: Mapping[int, asyncio.Future[socket.socket]],
        timeout_s: float,
        prompt: tuple[Mapping[int, str], float],
        cancelled: threading.Event | None,
        quiet: Callable[[], Collection[int]],
    ) -> None:
        """Wait for all streams, and not as long for the incoming ones of `prompt` peers. Raises RoundFailed."""
        began = time.monotonic()
        prompt_ones, prompt_s = prompt
        # A peer that was silent before this attempt may still come by another path.
        quiet_before = set(quiet())
        pending = {*outgoing.values(), *incoming.values()}
        while pending:
            slice_, waits_from = slice_s(len(outgoing)), time.monotonic()
            _, pending = await asyncio.wait(pending, timeout=slice_, return_when=asyncio.FIRST_EXCEPTION)
            # While this process was stopped, it could hear from nobody.
            began += max(0.0, time.monotonic() - waits_from - 2 * slice_)
            waited_s = time.monotonic() - began
            is_late = waited_s > (1 - _MUCH_OF_IT) * timeout_s
            if failed := {
                rank: future.exception() for rank, future in outgoing.items() if _has_failed(future)
            }:
                raise RoundFailed(
                    f"cannot reach {_named(failed)}: {next(iter(failed.values()))}",
                    failed,
                    silent=failed if is_late else (),
                )
            missing = {rank for rank in outgoing if pending & {outgoing[rank], incoming[rank]}}
            # If many are missing, this peer or its machine is slow.
            many = 1 + max(1, len(outgoing) // 4)
            silent = missing if is_late and len(missing) < many else set[int]()
            if cancelled is not None and cancelled.is_set():
                raise RoundFailed("cancelled", silent=silent)
            fallen = missing & set(quiet()) - quiet_before
            if fallen and waited_s > min(OFTEN_S, timeout_s / 4):
                few = fallen if len(fallen) < many else set[int]()
                raise RoundFailed(f"{_named(fallen)} has fallen silent", fallen, silent=few)
            # A peer that has closed its idle stream is opening another.
            tardy = {
                rank
                for rank, peer in prompt_ones.items()
                if incoming[rank] in pending and self._idle.get(peer)
            }
            if tardy and len(tardy) < many and waited_s > prompt_s:
                raise RoundFailed(f"{_named(tardy)} has not begun the exchange", tardy, silent=tardy)
            if pending and waited_s > timeout_s:
                raise RoundFailed(
                    f"no streams with {_named(missing)} in {timeout_s:g} s", missing, silent=silent
                )

    async def _name_outgoing(self, attempt: bytes, peer: str, timeout_s: float) -> socket.socket:
        """A stream to this peer, kept or new, on which the attempt has been named."""
        sock = self._outgoing.pop(peer, None)
        if sock is None or not self._is_usable(peer, sock):
            if sock is not None:
                sock.close()
            sock = await self._transport.open(peer, self._protocol, timeout_s=timeout_s)
        with socket_io.closed_on_error(sock):
            await socket_io.send_all(sock, attempt)
        return sock

    def _is_usable(self, peer: str, kept: socket.socket) -> bool:
        """Whether this idle outgoing stream still works: nothing has arrived on it, not even its end, and its path is
        not suspected."""
        may_be_dead = self._choice is not None and self._choice.may_be_dead(peer, kept)
        return not may_be_dead and is_silent(kept)

    def _renew(self, peer: str) -> None:
        """An incoming stream of this peer broke: if the outgoing one did too, replace it before a round needs it."""
        if (kept := self._outgoing.get(peer)) is not None and not is_silent(kept):
            del self._outgoing[peer]
            kept.close()
            self.open_ahead(peer)

    def _improve(self, peer: str, current: socket.socket) -> None:
        """Look for a better stream than the current one while no round waits for it; the next round takes it."""
        choice = self._choice
        if choice is not None:
            self._open_in_background(peer, lambda: choice.improved(peer, current))

    def _open_in_background(
        self, peer: str, open_stream: Callable[[], Coroutine[Any, Any, socket.socket | None]]
    ) -> None:
        async def keep() -> None:
            try:
                async with self._openers:
                    sock = await open_stream()
            except PeersError as error:
                log.debug("no new stream to %s: %s", peer, error)
                return
            if sock is not None:
                if (older := self._outgoing.pop(peer, None)) is not None:
                    older.close()
                self._outgoing[peer] = sock

        if peer not in self._opening:
            task = self._opening[peer] = asyncio.create_task(keep())
            task.add_done_callback(lambda _: self._opening.pop(peer, None))

    # Incoming

    async def _accepted(self, peer_id: str, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._watch(peer_id, sock)

    def _watch(self, peer: str, sock: socket.socket) -> None:
        watched = self._idle[peer]
        while len(watched) >= MAX_IDLE_PER_PEER:
            watched.pop(next(iter(watched))).cancel()
        while len(self._idle) > MAX_IDLE_PEERS:
            for reading in self._idle.pop(next(iter(self._idle))).values():
                reading.cancel()
        task = watched[sock] = asyncio.create_task(_read_name(sock))
        task.add_done_callback(lambda task: self._after_reading(peer, sock, task))

    def _after_reading(self, peer: str, sock: socket.socket, task: asyncio.Task[bytes]) -> None:
        self._idle.get(peer, {}).pop(sock, None)
        if not self._idle.get(peer, True):
            del self._idle[peer]
        # Only now has the event loop let go of the socket, so only now may it be closed.
        if task.cancelled():
            sock.close()
        elif (error := task.exception()) is not None:
            log.debug("dropped an idle stream of %s: %s", peer, error)
            sock.close()
            self._renew(peer)
        else:
            self._hand_over(task.result(), peer, sock)

    def _hand_over(self, attempt: bytes, peer: str, sock: socket.socket) -> None:
        awaited = self._awaited.get((attempt, peer))
        if awaited is not None and not awaited.done():
            awaited.set_result(sock)
            return
        others = [key for key in self._named if key[1] == peer]
        for key in others[: max(0, len(others) + 1 - MAX_IDLE_PER_PEER)]:
            self._named.pop(key).close()
        if (double := self._named.pop((attempt, peer), None)) is not None:
            double.close()
        self._named[attempt, peer] = sock
        while len(self._named) > MAX_IDLE_PER_PEER * MAX_IDLE_PEERS:
            self._named.pop(next(iter(self._named))).close()

    def _await_incoming(self, attempt: bytes, peer: str) -> asyncio.Future[socket.socket]:
        future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        if (sock := self._named.pop((attempt, peer), None)) is not None:
            future.set_result(sock)
        else:
            self._awaited[attempt, peer] = future
        return future


async def _read_name(sock: socket.socket) -> bytes:
    """Read the attempt id that the peer sends on an idle stream, and not one byte more."""
    name = b""
    while len(name) < ATTEMPT_BYTES:
        # An idle stream is silent for as long as training takes. But an id that has begun to arrive must come soon.
        async with asyncio.timeout(ANSWER_S if name else None):
            piece = await socket_io.receive(sock, ATTEMPT_BYTES - len(name))
        if not piece:
            raise ConnectionError("closed while idle")
        name += piece
    return name


async def _give_up(futures: Sequence[asyncio.Future[socket.socket]], farewell: bytes = b"") -> None:
    """Cancel those that are not open yet, and close the open streams.

    The farewell is an abort that does not blame its reader: without it, a peer that is in the round already would take
    this one for dead.
    """
    for outcome in await cancelled(futures):
        if isinstance(outcome, socket.socket):
            with contextlib.suppress(OSError):
                outcome.send(farewell)
            outcome.close()


def _named(ranks: Iterable[int]) -> str:
    return "peer " + ", ".join(map(str, sorted(ranks)))


def _has_failed(future: asyncio.Future[socket.socket]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
