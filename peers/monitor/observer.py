"""A look at a swarm from outside, without joining it: what its peers announce, and what they answer.

The observer finds peers in the DHT, keeps a stream to each on which it reports (peers/protocol/reports.py), and asks
again where one breaks. What follows from all that is decided in peers/monitor/observations.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence, Set
from functools import lru_cache
from typing import Any

from msgspec.msgpack import Decoder

from peers.admission import bans
from peers.admission.secrets import SwarmSecret
from peers.errors import PeersError, PeerUnreachable, ProtocolError, UserError
from peers.monitor.observations import LOST, SILENT, Observations
from peers.monitor.report_service import proof_of
from peers.monitor.summary import holders_of, summary_of
from peers.net.channel import Channel, call
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.net.identity import load_or_create
from peers.net.socket_directory import SocketDirectory
from peers.protocol import reports
from peers.protocol.admission import Nonce, Proof
from peers.protocol.certificates import Certificate, verify_signature
from peers.protocol.records import PEERS_KEY, Announcement
from peers.protocol.refusal import Refusal, Refused, Why, unless_refused
from peers.protocol.reports import Report
from peers.tasks import cancelled, is_set_within
from peers.timing import OFTEN_S, PROBE_S, RETRY_S, rest_s

LOOK_INTERVAL_S = 2 * OFTEN_S
"""Between two looks into the DHT, of few peers."""
DIAL_TIMEOUT_S = PROBE_S / 2
"""For reaching a peer and hearing its first report."""
SILENCE_S = 6 * OFTEN_S
"""A stream on which nothing comes for so long is given up."""
AGAIN_S = (RETRY_S, PROBE_S)
"""The pause before a peer is asked again: the first one, and the longest."""
SETTLE_S = 4 * OFTEN_S
"""How long a single look waits for peers that are slow to answer."""
ENOUGH_MISSES = 2
"""Failed attempts until a new peer counts as unreachable: one may be due to a busy machine or a slow link."""
MAX_STREAMS = 256
"""Peers that are asked at once; of a larger swarm, the others are shown as they announce themselves."""
MAX_DIALLED = 32
_FIRST: Decoder[Nonce | Report | reports.Busy] = Decoder(Nonce | Report | reports.Busy)
_REPORT: Decoder[Report | Refusal] = Decoder(Report | Refusal)

log = logging.getLogger(__name__)


class Withheld(PeersError):
    """The peer is there, but gives this observer no report. The message is for the verdict."""


@contextlib.asynccontextmanager
async def observing(
    run_id: str, initial_peers: Sequence[str], *, timeout_s: float, secret: SwarmSecret | None = None
) -> AsyncIterator[Observer]:
    """An observer at work; with the swarm secret, it observes only peers that were admitted.

    Raises UserError when nobody answers in time.
    """
    gate = Gate(run_id, secret.public_key if secret else None)
    async with contextlib.AsyncExitStack() as stack:
        # An observer needs no identity that lasts.
        directory = stack.enter_context(SocketDirectory())
        identity = load_or_create(directory.path / "observer.key")
        try:
            async with asyncio.timeout(timeout_s):
                dht = await Dht.join(
                    identity=identity, initial_peers=initial_peers, client_mode=True, timeout_s=timeout_s
                )
                stack.push_async_callback(dht.close)
                if not gate.is_open:
                    await bans.exchange(dht, run_id, gate, await bans.admitted(dht, run_id, gate))
                observer = Observer(run_id, dht, gate, secret)
                stack.push_async_callback(observer.close)
                await observer.start()
        except TimeoutError as error:
            raise UserError(
                f"the swarm did not answer within {timeout_s:g} s; try a longer --timeout"
            ) from error
        yield observer


class Observer:
    """Used from one event loop."""

    def __init__(self, run_id: str, dht: Dht, gate: Gate, secret: SwarmSecret | None) -> None:
        self._run_id, self._dht, self._gate, self._secret = run_id, dht, gate, secret
        self._observations = Observations()
        self._dials = asyncio.Semaphore(MAX_DIALLED)
        self._following: dict[str, asyncio.Task[None]] = {}
        self._unasked: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._one_looks, self._looked_at = asyncio.Lock(), 0.0
        self._news = asyncio.Event()

    async def start(self) -> None:
        """Look around once, and keep looking."""
        await self._look()
        self._looking = asyncio.create_task(self._look_forever())
        self._watching = asyncio.create_task(self._dht.fail_with_p2pd())

    async def close(self) -> None:
        await cancelled(task for task in (self._looking, self._watching, *self._following.values()) if task)

    async def settled(self, timeout_s: float) -> None:
        """Wait until every known peer has answered or proved unreachable. No event is recorded for peers that are there
        by then.
        """
        deadline = time.monotonic() + timeout_s
        while self._unasked and time.monotonic() < deadline:
            await self.changed(deadline - time.monotonic())
        self._observations.note(time.monotonic(), time.time(), silently=True)

    async def changed(self, timeout_s: float) -> None:
        """Wait until something has changed, at most `timeout_s`. Raises PeersError if nothing can change any more."""
        if self._watching is not None and self._watching.done():
            self._watching.result()
        self._news.clear()
        await is_set_within(self._news, timeout_s)

    def swarm(self) -> dict[str, Any]:
        """The swarm's current state (`summary_of`)."""
        now, unix_now = time.monotonic(), time.time()
        self._observations.note(now, unix_now)
        return summary_of(self._run_id, self._observations, now=now, unix_now=unix_now)

    def curves(self) -> dict[int, list[tuple[float, int, float | None, float]]]:
        """By world rank, each peer's training curve: (Unix time, step, loss, tokens/s)."""
        holders = holders_of(self._observations, now=time.monotonic())
        return {
            rank: [(point.time, point.step, point.loss, point.tokens_per_s) for point in peer.curve.points]
            for rank, peer in holders.items()
            if peer.curve.points
        }

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(max(LOOK_INTERVAL_S, self._rest_s))
            await self._look_since(time.monotonic())

    @property
    def _rest_s(self) -> float:
        """How long records of so many peers stay the same."""
        return rest_s(len(self._observations.peers))

    async def _look_since(self, moment: float) -> None:
        """Look around, unless another task has begun to since that moment, or so shortly before that records are the
        same: hundreds of peers may be out of reach."""
        async with self._one_looks:
            if self._looked_at < moment - self._rest_s:
                try:
                    await self._look()
                except PeersError as error:
                    log.debug("no look into the DHT: %s", error)

    async def _look(self) -> None:
        self._looked_at, refused = time.monotonic(), set[Why]()

        def check(record: Announcement) -> None:
            try:
                self._gate.check_quietly(record)
            except Refused as error:
                refused.add(error.why)
                raise

        found = await announced(self._dht, PEERS_KEY(self._run_id), Announcement, self._run_id, check)
        self._observations.withheld = "" if found else _not_of_secret(refused)
        for record in found.values():
            if self._is_reborn(record):
                self._stop_asking(record.peer_id)
            self._observations.announced(record, time.monotonic())
            self._dht.remember(record.peer_id, record.maddrs)
            if record.state != "leaving":
                self._follow(record.peer_id)
        self._news.set()

    def _is_reborn(self, record: Announcement) -> bool:
        """Whether the peer was restarted: then what is known of its earlier stream is out of date."""
        known = self._observations.peers.get(record.peer_id)
        return (
            known is not None
            and record.time > known.announcement.time
            and record.incarnation != known.announcement.incarnation
        )

    def _stop_asking(self, peer_id: str) -> None:
        if (task := self._following.pop(peer_id, None)) is not None:
            task.cancel()

    def _follow(self, peer_id: str) -> None:
        task = self._following.get(peer_id)
        if (task is None or task.done()) and peer_id in self._observations.peers:
            self._following = {i: other for i, other in self._following.items() if not other.done()}
            if len(self._following) < MAX_STREAMS:
                self._unasked.add(peer_id)
                self._following[peer_id] = asyncio.create_task(self._keep_asking(peer_id))

    async def _keep_asking(self, peer_id: str) -> None:
        """Ask a peer for reports, again and again, until it is gone for good."""
        rest_s, num_missed = AGAIN_S[0], 0
        while True:
            asked_at, withheld = time.monotonic(), ""
            try:
                await self._hear(peer_id)
            except (PeersError, OSError) as error:
                withheld = str(error) if isinstance(error, Withheld) else ""
                log.debug("%s does not report: %s", peer_id, error)
            took_s = time.monotonic() - asked_at
            # A new record may say that the peer has left or, after a restart, has another address.
            await self._look_since(time.monotonic())
            if self._following.get(peer_id) is not asyncio.current_task():
                # The peer was restarted, and another task asks it.
                return
            self._observations.missed(peer_id, withheld)
            num_missed += 1
            if withheld or num_missed >= ENOUGH_MISSES:
                self._unasked.discard(peer_id)
            self._news.set()
            if self._is_over(peer_id):
                return
            rest_s = AGAIN_S[0] if took_s > AGAIN_S[1] else min(2 * rest_s, AGAIN_S[1])
            await asyncio.sleep(rest_s)

    def _is_over(self, peer_id: str) -> bool:
        """Whether to stop asking: it has left, or nobody else sees it either. A new announcement begins anew."""
        peer = self._observations.peers.get(peer_id)
        if peer is None or peer.announcement.state == "leaving":
            return True
        is_lost = self._observations.state_of(peer_id, time.monotonic()) in (LOST, SILENT)
        return is_lost and time.time() - peer.announcement.time > 2 * SILENCE_S

    async def _hear(self, peer_id: str) -> None:
        """Receive reports on one stream, to its end. Raises PeersError (Withheld if the peer gives none), OSError."""
        peer = self._observations.peers.get(peer_id)
        if peer is None:
            raise PeerUnreachable("it has been forgotten")
        maddrs = peer.announcement.maddrs
        async with self._dials:
            channel = await call(
                self._dht.transport,
                peer_id,
                reports.report_protocol(self._run_id),
                timeout_s=DIAL_TIMEOUT_S,
                maddrs=maddrs,
            )
        with channel:
            await channel.send(reports.Hello(), DIAL_TIMEOUT_S)
            said = await channel.read(_FIRST, DIAL_TIMEOUT_S)
            if isinstance(said, reports.Busy):
                raise Withheld(
                    "the peers already report to as many observers as they can: end another `diloco status --watch` "
                    "or dashboard"
                )
            report = await self._admitted(peer_id, said.nonce, channel) if isinstance(said, Nonce) else said
            while True:
                self._heard(peer_id, report)
                report = unless_refused(await channel.read(_REPORT, SILENCE_S))

    async def _admitted(self, peer_id: str, nonce: bytes, channel: Channel) -> Report:
        """Prove that this observer has the swarm secret, and return the first report. Raises Withheld."""
        if self._secret is None:
            raise Withheld(
                "this swarm is closed: give --swarm-secret-file FILE, a copy of the one that `diloco dht start` names"
            )
        proof = proof_of(self._secret, self._run_id, self._dht.peer_id, peer_id, nonce)
        await channel.send(Proof(proof=proof), DIAL_TIMEOUT_S)
        try:
            return unless_refused(await channel.read(_REPORT, DIAL_TIMEOUT_S))
        except Refused as error:
            raise Withheld(
                "this swarm is closed, and the given secret is older or newer than its peers': give a copy of the file "
                "that they were started with"
            ) from error

    def _heard(self, peer_id: str, report: Report) -> None:
        """Raises ProtocolError for a report that is not of a peer of the run, or shows what is not proved."""
        check_certified(report)
        status = Announcement.decode(peer_id, report.status, run_id=self._run_id, now=time.time())
        if not self._gate.is_admitted(status):
            raise ProtocolError("it is no longer admitted to the run")
        self._observations.reported(status, report, time.monotonic(), unix_now=time.time())
        self._unasked.discard(peer_id)
        self._news.set()


def _not_of_secret(refused: Set[Why]) -> str:
    """What to tell the user if all announcements were refused, for these reasons."""
    if Why.FORGED in refused:
        return "the given swarm secret is not this swarm's: give a copy of the file that `diloco dht start` names"
    if Why.NO_TOKEN in refused:
        return "this swarm is open: give no --swarm-secret-file, and unset DILOCO_SWARM_SECRET"
    return ""


def check_certified(report: Report) -> None:
    """Raises ProtocolError for a certificate that its signers have not signed: an observer shows what is proved."""
    if report.certified is None:
        return
    certificate = report.certified.certificate
    if certificate.num_bytes > reports.MAX_CERTIFICATE_BYTES:
        raise ProtocolError(f"a certificate of {certificate.num_bytes} bytes in a report")
    if not _is_signed(certificate):
        raise ProtocolError("a certificate that its signers have not signed")


@lru_cache(maxsize=64)
def _is_signed(certificate: Certificate) -> bool:
    """All peers show the same certificate: it is checked once."""
    return certificate.is_signed(verify_signature)
