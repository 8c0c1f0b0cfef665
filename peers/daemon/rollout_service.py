"""The learner's side of the rollout protocol: hands its policy to rollout peers, and their rollouts to its trainer.

The trainer says what its weights are and asks for rollouts on a connection of its own to the daemon (link.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.msgpack import Decoder

from peers.daemon.link import DaemonConnection
from peers.daemon.rollout_queue import RolloutQueue, Taken, Terms, Waiting
from peers.errors import PeersError, PeerSilent, ProtocolError
from peers.net.channel import Channel
from peers.net.gate import Gate
from peers.protocol.mesh import Manifest, Scalar
from peers.protocol.refusal import Refusal, Refused
from peers.protocol.reports import MAX_ROLLOUT_PEERS, RolloutSender
from peers.protocol.rollouts import (
    MAX_BLOBS,
    MAX_MESSAGE_BYTES,
    Asked,
    Blob,
    BlobName,
    Hello,
    NoBlob,
    NoPolicy,
    Policy,
    Signed,
    Verdict,
    WantBlob,
    WantPolicy,
    Welcome,
    verified,
)
from peers.tasks import is_set_within
from peers.timing import ANSWER_S, COMMIT_S, FORGET_S, PROBE_S, STALL_S

MAX_STREAMS = 128
"""Streams of all rollout peers together; each of them has two."""
_HELLO: Decoder[Hello] = Decoder(Hello)
_ASKED: Decoder[Asked] = Decoder(Asked)
_PIECE_BYTES = 1 << 20
_SILENCE_S = FORGET_S
"""A rollout peer that is silent on all of its streams for this long has gone."""
_PATIENCE_S = COMMIT_S
"""How long a trainer waits for a rollout peer to come, or to come back."""
_IDLE_S = 6 * FORGET_S
"""A trainer does not wait for a rollout peer that hands nothing over for this long: far more than it takes to fetch and
load a large model and to generate a batch."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WeightsFile:
    """A file that the trainer has written: all weights, or the changes since earlier ones."""

    path: str
    sha256: str
    num_bytes: int
    leads_to: str
    """Digest of the weights that result from this file."""
    base: str = ""
    """Digest of the weights that this file changes; empty: it holds all weights."""


class RolloutService:
    """Used from one event loop. `manifest` gives what the swarm has agreed on."""

    def __init__(
        self, run_id: str, me: str, gate: Gate, manifest: Callable[[], Mapping[str, Scalar]]
    ) -> None:
        self.queue = RolloutQueue(run_id, me, first_number=time.time_ns() // 1_000_000)
        self._run_id, self._gate, self._manifest = run_id, gate, manifest
        self._files: list[WeightsFile] = []
        self._digest = ""
        """Of the newest weights."""
        self._news = asyncio.Event()
        self._streams: dict[asyncio.Task[Any], str] = {}
        self._heard_at: dict[str, float] = {}
        """When each rollout peer that is present last said something, on any stream."""
        self._gave_at: dict[str, float] = {}
        """When each rollout peer that is present last handed over a rollout that was kept, or came."""
        self._left_at = float("-inf")
        """When the last stream of a rollout peer ended; at first, when rollout peers could come."""

    @property
    def present(self) -> frozenset[str]:
        """The rollout peers that have a stream here."""
        return frozenset(self._streams.values())

    def senders_shown(self) -> tuple[RolloutSender, ...]:
        """Figures of the newest rollout peers, for observers."""
        newest = list(self.queue.senders.items())[-MAX_ROLLOUT_PEERS:]
        present, now = self.present, time.monotonic()
        return tuple(
            RolloutSender(peer_id=peer_id, is_here=peer_id in present, **sender.figures(now))
            for peer_id, sender in newest
        )

    # The trainer

    async def serve_trainer(
        self,
        connection: DaemonConnection,
        message: dict[str, Any],
        answer: Callable[[Awaitable[Taken]], Awaitable[Taken]],
    ) -> None:
        """Serve a trainer until it hangs up; `answer` awaits a result and keeps it waiting. Raises LinkLost."""
        while True:
            match message["kind"]:
                case "policy":
                    self._published(message)
                case "take":
                    count, timeout_s = int(message["count"]), float(message["timeout_s"])
                    taken = await answer(self._take(count, timeout_s))
                    await connection.send(
                        "rollouts",
                        num_rollouts=len(taken.rollouts),
                        num_uniform=len(taken.uniform),
                        senders={one.peer_id: msgspec.structs.asdict(one) for one in self.senders_shown()},
                        is_alone=time.monotonic() >= self._alone_from(),
                    )
                    # In frames of their own: those of a large generation are longer together than a frame may be.
                    for one in (*taken.rollouts, *taken.uniform):
                        await connection.send("rollout", **_told(one))
                case "leave out":
                    self.queue.leave_out(str(message["peer_id"]), str(message["reason"]))
                case kind:
                    raise ProtocolError(f"unknown message {kind!r} about rollouts")
            message = await connection.receive()

    def _published(self, message: Mapping[str, Any]) -> None:
        digest, step, terms = str(message["digest"]), int(message["step"]), Terms(**message["terms"])
        self._files = [WeightsFile(**fields) for fields in message["files"]]
        self._digest = digest
        if self.queue.terms is None:
            self._left_at = time.monotonic()
        self.queue.published(digest, step, terms)

    async def _take(self, count: int, timeout_s: float) -> Taken:
        """Wait for `count` rollouts. Returns none after `timeout_s`, or once no rollout peer is to be waited for."""
        deadline = time.monotonic() + timeout_s
        while (taken := self.queue.take(count)) is None:
            left_s = min(deadline, self._alone_from()) - time.monotonic()
            if left_s <= 0:
                return Taken()
            self._news.clear()
            await is_set_within(self._news, left_s)
        return taken

    def _alone_from(self) -> float:
        """From when on no rollouts are to be expected, unless a rollout peer comes or hands one over before."""
        expected = [
            at + _IDLE_S for peer_id, at in self._gave_at.items() if peer_id not in self.queue.left_out
        ]
        return max([self._left_at + _PATIENCE_S, *expected])

    # Rollout peers

    async def handle(self, peer_id: str, sock: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        with Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES) as channel:
            try:
                if await self._welcomed(peer_id, channel):
                    if peer_id not in self.present:
                        log.info("rollout peer %s is here", peer_id)
                        self._gave_at[peer_id] = time.monotonic()
                    self._streams[task] = peer_id
                    self._heard_at[peer_id] = time.monotonic()
                    while True:
                        await self._answer(peer_id, channel)
            except ProtocolError as error:
                log.warning("dropped rollout peer %s: %s", peer_id, error)
            except PeersError as error:
                log.debug("rollout peer %s has gone: %s", peer_id, error)
            finally:
                if self._streams.pop(task, None) and peer_id not in self.present:
                    del self._heard_at[peer_id], self._gave_at[peer_id]
                    self._left_at = time.monotonic()
                    log.info("rollout peer %s has gone", peer_id)

    async def _welcomed(self, peer_id: str, channel: Channel) -> bool:
        hello = await channel.read(_HELLO, ANSWER_S)
        try:
            self._gate.check(peer_id, hello.token, "rollouts")
        except Refused as error:
            await channel.send_last(Refusal(why=error.why), ANSWER_S)
            return False
        why = self.queue.left_out.get(peer_id, "")
        if self.queue.terms is None or why or len(self._streams) >= MAX_STREAMS:
            await channel.send_last(NoPolicy(why=why), ANSWER_S)
            return False
        welcome = Welcome(
            manifest=Manifest(fields=dict(self._manifest())),
            next_number=self.queue.sender(peer_id).next_number,
        )
        await channel.send(welcome, ANSWER_S)
        return True

    async def _answer(self, peer_id: str, channel: Channel) -> None:
        asked = await self._asked(peer_id, channel)
        # Again with each request: meanwhile the peer may have been banned, or its token may have expired.
        self._gate.check_shown(peer_id, "rollouts")
        match asked:
            case WantPolicy(held):
                await channel.send(self._newest(held), ANSWER_S)
            case WantBlob(digest):
                await self._send_blob(peer_id, digest, channel)
            case Signed() as message:
                assert self.queue.terms is not None
                # Decoding thousands of tokens and checking a signature takes milliseconds.
                rollout = await asyncio.to_thread(verified, peer_id, message, self.queue.terms.most_bytes)
                now = time.monotonic()
                try:
                    dropped = self.queue.offer(peer_id, rollout, now)
                except ProtocolError as error:
                    await channel.send_last(Verdict(dropped=str(error)), PROBE_S)
                    raise
                if not dropped:
                    self._gave_at[peer_id] = now
                    self._news.set()
                await channel.send(Verdict(dropped=dropped), PROBE_S)

    async def _asked(self, peer_id: str, channel: Channel) -> Asked:
        """What the rollout peer asks next. Raises PeerSilent if it is silent on all of its streams."""
        while True:
            try:
                asked = await channel.read(_ASKED, _SILENCE_S)
            except PeerSilent:
                # A slow rollout peer is silent on one stream while it generates, and asks for policies on the other.
                if time.monotonic() - self._heard_at[peer_id] >= _SILENCE_S:
                    raise
            else:
                self._heard_at[peer_id] = time.monotonic()
                return asked

    def _newest(self, held: str) -> Policy | NoPolicy:
        """The newest weights, and the files that lead to them from those that are held."""
        files = way_to(self._digest, held, self._files)
        if files is None:
            return NoPolicy()
        names = tuple(BlobName(digest=file.sha256, num_bytes=file.num_bytes) for file in files)
        base = files[0].base if files else ""
        return Policy(digest=self._digest, step=self.queue.step, base=base, blobs=names)

    async def _send_blob(self, peer_id: str, digest: str, channel: Channel) -> None:
        file = next((file for file in self._files if file.sha256 == digest), None)
        if file is not None:
            # The trainer may have written newer files meanwhile, and removed this one.
            with contextlib.suppress(FileNotFoundError), Path(file.path).open("rb") as content:
                await channel.send(Blob(), ANSWER_S)
                left = file.num_bytes
                while left:
                    piece = await asyncio.to_thread(content.read, min(left, _PIECE_BYTES))
                    if not piece:
                        raise PeersError(f"{file.path} is shorter than it was")
                    left -= len(piece)
                    await channel.send_bytes(memoryview(piece), STALL_S)
                    # It takes what it is sent, and can say nothing on its other stream before it has all.
                    self._heard_at[peer_id] = time.monotonic()
                return
        await channel.send(NoBlob(), ANSWER_S)


def way_to(newest: str, held: str, files: Sequence[WeightsFile]) -> list[WeightsFile] | None:
    """The files that lead from the weights `held` to `newest`, in order, by the fewest bytes; None: no files do."""
    wholes = {file.leads_to: file for file in files if not file.base}
    patches = {file.leads_to: file for file in files if file.base}
    ways: list[list[WeightsFile]] = []
    at, way = newest, list[WeightsFile]()
    while len(way) < MAX_BLOBS:
        if at == held:
            ways.append(way)
            break
        if at in wholes:
            ways.append([wholes[at], *way])
        if at not in patches:
            break
        way = [patches[at], *way]
        at = patches[at].base
    return min(ways, key=lambda way: sum(file.num_bytes for file in way), default=None)


def _told(one: Waiting) -> dict[str, Any]:
    return {
        "peer_id": one.peer_id,
        "example": one.example,
        "staleness": one.staleness,
        "completions": msgspec.Raw(one.completions),
    }
