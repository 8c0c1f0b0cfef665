"""One peer's parts, wired together: what it shows, what reaches it, and its life from joining to leaving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peers.admission.service import AdmissionService
from peers.core import events
from peers.core.peer import Peer
from peers.core.schedule import Schedule
from peers.core.settings import Settings
from peers.core.weights import Aggregation
from peers.daemon.agreement import Agreement
from peers.daemon.config import DaemonConfig, grace_of, optimizer_of
from peers.daemon.host import WorkerHost, WorkerStanding
from peers.daemon.link import Accept
from peers.daemon.pledges import Pledges
from peers.daemon.presence import Presence
from peers.daemon.reductions import Reductions
from peers.daemon.restarts import USER_ERROR, WorkerEnd
from peers.daemon.runtime import Runtime, RuntimeSettings
from peers.daemon.supervisor import Supervisor, WorkerCommand
from peers.daemon.trainers import Trainers
from peers.daemon.worker_session import serve_workers
from peers.errors import PeersError, UserError
from peers.monitor.prometheus import metrics_served
from peers.monitor.report_service import ReportService
from peers.monitor.reporting import Reporting
from peers.net.dht.node import Dht
from peers.net.identity import Identity
from peers.net.paths.network import Network, NetworkSettings
from peers.net.paths.reachability import Reachability
from peers.net.states.server import StateServer
from peers.net.streams import StreamPool
from peers.protocol.mesh import Carried, Manifest, Scalar, WantManifest
from peers.protocol.records import NO_RANK, Announcement
from peers.protocol.reports import Phase
from peers.protocol.signatures import verify_signature
from peers.reduce.all_reduce import OVERLAPPED_NICENESS
from peers.state.outer_state import OuterState
from peers.threads import give_way
from peers.timing import BEAT_S

log = logging.getLogger(__name__)

WorkerFactory = Callable[[Mapping[str, Scalar], int, Path], WorkerCommand]
"""(manifest, world rank, link socket) -> the command that trains."""


class Daemon:
    """One peer's parts, wired together."""

    def __init__(
        self, config: DaemonConfig, identity: Identity, dht: Dht, admission: AdmissionService
    ) -> None:
        self._config, self._dht, self._identity, self._admission = config, dht, identity, admission
        self._incarnation = time.time_ns()
        self._standing = WorkerStanding()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor: Supervisor | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._runtime: Runtime | None = None
        self._news: tuple[str, str, int] | None = None
        self._trainers = Trainers()
        self._met: frozenset[str] = frozenset()
        self._network = Network(
            run_id=config.run_id,
            identity=identity,
            libp2p=dht.transport,
            settings=NetworkSettings(
                transport=config.transport,
                host_maddrs=config.host_maddrs,
                announce_maddrs=config.announce_maddrs,
                data_port=config.data_port,
                announce_data_maddrs=config.announce_data_maddrs,
            ),
            peers=lambda: self._presence.mesh.peers,
            gate=admission.gate,
        )
        self._reachability = Reachability(config.run_id, identity, dht.transport, admission.gate)
        paths = self._network.paths
        self._presence = Presence(
            run_id=config.run_id,
            identity=identity,
            dht=dht,
            transport=paths,
            galaxy_size=config.galaxy_size,
            describe=self._describe,
            on_change=self._view_changed,
            on_message=self._received,
            on_lost=self._lost,
            gate=admission.gate,
        )
        self._agreement = Agreement(self._presence)
        self._pool = StreamPool(paths, self._network.data_protocol, paths)
        self._deadline = time.monotonic() + config.timeout_waiting_for_peers
        self._host = WorkerHost(
            run_id=config.run_id,
            presence=self._presence,
            agreement=self._agreement,
            standing=self._standing,
            transport=paths,
            waited_out=self._waited_out,
        )
        self._reporting = self._new_reporting()
        self._reports = ReportService(
            config.run_id,
            identity.peer_id,
            dht.transport,
            self._reporting.report,
            secret=admission.secret,
            is_banned=lambda peer_id: peer_id in admission.gate.bans.peer_ids,
        )

    def metrics_served(self, port: int) -> contextlib.AbstractAsyncContextManager[int]:
        """Its figures, for a Prometheus on this machine."""
        return metrics_served(port, self._reporting.as_swarm, lambda: self._describe().world_rank)

    def tell_phases(self, on_phase: Callable[[Phase], None]) -> None:
        """From now on, what this peer is doing."""

        async def tell() -> None:
            while True:
                on_phase(self._host.phase)
                await asyncio.sleep(BEAT_S)

        self._spawn(tell())

    async def live(self, accept: Accept, link_path: Path, worker: WorkerFactory | None) -> int:
        """Everything between joining the DHT and leaving it."""
        self._spawn(serve_workers(accept, self._host))
        self._spawn(self._watch_p2pd())
        self._spawn(self._admission.run())
        try:
            manifest = await self._enter()
        except UserError as error:
            await self._host.refuse(error, wait=worker is None)
            raise
        log.info("agreed on the manifest %s", self._agreement.digest[:12])
        self._host.activity.preparing = "the training process"
        runtime = self._runtime = self._new_runtime(manifest)
        for peer_id in self._met:
            runtime.post(events.Connected(peer_id))
        self._spawn(runtime.run())
        server = StateServer(
            self._network.paths, self._config.run_id, self._current_state, runtime.commit_log
        )
        await server.start()
        gate = self._admission.gate
        gate.on_bans.append(lambda: server.drop(gate.bans.peer_ids))
        return await self._until_done(runtime, link_path, worker)

    async def _enter(self) -> dict[str, Scalar]:
        """Take this peer's place in the swarm, and agree with it. Raises UserError."""
        await self._network.start()
        await self._reachability.start()
        await self._presence.enter(self._config.world_rank)
        log.info("in the swarm; other peers that are here: %d", len(self._presence.view) - 1)
        self._spawn(self._presence.announce_forever())
        await self._reports.start()
        await self._pool.start()
        self._host.activity.preparing = "agreeing with the swarm"
        return await self._agreement.reach(
            self._config.manifest, self._config.named, waited_out=self._waited_out
        )

    async def close(self) -> None:
        """Leave, whatever the reason: who says so keeps nobody waiting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._presence.maddrs:
            log.info("leaving the swarm")
            self._standing.state = "leaving"
            self._reports.changed()
            await self._presence.leave()
        await self._pool.close()
        await self._presence.close()
        await self._network.close()

    def _new_reporting(self) -> Reporting:
        return Reporting(
            self._host.journal,
            hardware=self._config.hardware,
            identity=self._identity,
            describe=self._describe,
            met=lambda: self._presence.mesh.peers,
            standing=lambda: self._host.standing_in_round,
            phase=lambda: self._host.phase,
            run=lambda: self._host.run_figures,
            link_bytes_per_s=lambda: self._runtime.bandwidth if self._runtime else 0.0,
            forwarded_bytes=lambda: self._network.forwarded_bytes,
            certificate=lambda: state.header.certificate if (state := self._current_state()) else None,
        )

    def _new_runtime(self, manifest: Mapping[str, Scalar]) -> Runtime:
        """The core with the manifest's settings, and what carries it out."""
        config, schedule, identity = self._config, Schedule.of(manifest), self._identity
        codec, aggregation = str(manifest.get("hv.compression") or "fp32"), Aggregation.of(manifest)
        niceness = OVERLAPPED_NICENESS if schedule.overlap_steps else 0
        if niceness:
            give_way(niceness)
        pledges = Pledges(identity.path.with_suffix(".pledges"))
        core = Peer(
            keys=identity,
            verify=verify_signature,
            settings=Settings(
                manifest=self._agreement.digest,
                steps_per_epoch=schedule.steps_per_epoch,
                num_fragments=schedule.num_fragments,
                aggregation=aggregation,
                quorum=config.quorum,
                grace_s=grace_of(config),
                attempt_timeout_s=config.averaging_timeout or math.inf,
                galaxy_size=self._presence.galaxy_size,
                founders_timeout_s=max(0.0, self._deadline - time.monotonic()),
            ),
            incarnation=self._incarnation,
            world_rank=self._presence.world_rank,
            pledges=pledges.attempts,
            now=time.monotonic(),
        )
        reductions = Reductions(
            me=identity.peer_id,
            codec=codec,
            aggregation=aggregation,
            niceness=niceness,
            pool=self._pool,
            optimizer_for=lambda num_members: optimizer_of(manifest, num_members),
            timing=core.timing,
            is_live=core.swarm.is_live,
            forwarded_bytes=lambda: self._network.forwarded_bytes,
        )
        return Runtime(
            core,
            settings=RuntimeSettings(
                codec=codec,
                local_steps=schedule.local_steps,
                optimizer_for=lambda num_members: optimizer_of(manifest, num_members),
            ),
            messenger=self._presence.mesh,
            reductions=reductions,
            pledges=pledges,
            download=self._host.download,
            on_change=self._core_changed,
            on_tell=lambda tell: self._host.journal.happened(time.time(), tell.text),
        )

    def _core_changed(self) -> None:
        assert self._runtime is not None
        core = self._runtime.core
        news = core.head, core.phase, core.world_rank
        if news != self._news:
            self._news = news
            self._presence.publish()
            self._reports.changed()

    async def _until_done(self, runtime: Runtime, link_path: Path, worker: WorkerFactory | None) -> int:
        """Until the worker command is over, or (without one) its worker says it has finished or is gone."""
        done: asyncio.Task[Any] = asyncio.create_task(self._train(runtime, link_path, worker))
        try:
            await asyncio.wait({done, self._failed, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in (self._failed, *self._tasks):
                if task.done():
                    task.result()
                    raise PeersError(f"a part of the daemon ended early: {task}")
            return int(done.result())
        finally:
            done.cancel()
            if self._supervisor is not None:
                await self._supervisor.stop()

    async def _train(self, runtime: Runtime, link_path: Path, worker: WorkerFactory | None) -> int:
        """As soon as this peer has a world rank. Raises PeersError where the worker was given up on."""
        core = runtime.core
        while core.world_rank == NO_RANK:
            await self._presence.wait_for_change()
        log.info("training as world rank %d", core.world_rank)
        self._host.ready.set_result(runtime)
        if worker is None:
            await self._host.finished_at.wait()
            return 0
        command = worker(self._agreement.manifest, core.world_rank, link_path)
        supervisor = self._supervisor = Supervisor(command, _tell_of_restart)
        self._host.on_progress = supervisor.notify_progress
        self._host.on_commit = supervisor.notify_commit
        return _code_of(supervisor, await supervisor.run())

    def _spawn(self, coroutine: Any) -> None:
        self._tasks.append(asyncio.create_task(coroutine))

    async def _watch_p2pd(self) -> None:
        await self._dht.wait_dead()
        raise PeersError(
            "p2pd, the process that carries this peer's connections, has died; start the peer again"
        )

    # What this peer shows, and what reaches it

    def _describe(self) -> Announcement:
        state = self._current_state()
        return Announcement(
            peer_id=self._identity.peer_id,
            world_rank=self._runtime.core.world_rank if self._runtime else self._presence.world_rank,
            run_id=self._config.run_id,
            incarnation=self._incarnation,
            state=self._standing.state,
            epoch=state.epoch if state else 0,
            head=state.head if state else "",
            step=self._standing.step,
            local_step=self._standing.local_step(self._host.steps_per_epoch),
            step_s=self._standing.pace.step_s,
            committed_tokens=state.committed_tokens if state else 0,
            tokens_per_s=self._standing.tokens_per_s,
            anchor_digest=state.anchor_digest if state else "",
            manifest_digest=self._agreement.digest,
            maddrs=self._presence.maddrs,
            time=time.time(),
            endpoints=self._network.endpoints(self._presence.maddrs),
            paths=self._network.paths_shown(),
            token=self._admission.token,
        )

    def _current_state(self) -> OuterState | None:
        return self._runtime.state if self._runtime is not None else None

    def _view_changed(self) -> None:
        view = self._presence.view
        met = frozenset(view) - {self._identity.peer_id}
        for peer_id in self._met - met:
            self._pool.drop(peer_id)
        if self._runtime is not None:
            for peer_id in met - self._met:
                self._runtime.post(events.Connected(peer_id))
        self._met = met
        lost, back = self._trainers.seen(view)
        for rank in back:
            log.info("peer %d is back", rank)
            self._host.journal.happened(time.time(), f"peer {rank} is back")
        # A peer that leaves hangs up itself.
        if lost and self._runtime is not None and self._standing.state != "leaving":
            lost_ranks = ", ".join(map(str, lost))
            log.warning("lost peer %s", lost_ranks)
            self._host.journal.happened(time.time(), f"lost peer {lost_ranks}")
            if self._config.fail_rank_drop and not self._failed.done():
                self._failed.set_exception(
                    PeersError(f"lost peer {lost_ranks}, and --hv.fail-rank-drop is set")
                )
        self._reports.changed()

    def _received(self, sender: Announcement, message: Carried) -> None:
        """A message from a live peer. Raises ProtocolError, which costs it the channel."""
        if isinstance(message, Manifest | WantManifest):
            self._agreement.received(sender, message)
        elif self._runtime is not None:
            self._runtime.post(events.Received(sender.peer_id, message))

    def _lost(self, peer_id: str) -> None:
        if self._runtime is not None:
            self._runtime.post(events.Disconnected(peer_id))

    def _waited_out(self) -> bool:
        return time.monotonic() > self._deadline


def _tell_of_restart(end: WorkerEnd) -> None:
    if end.restarts:
        log.warning("%s", end.in_words())


def _code_of(supervisor: Supervisor, end: WorkerEnd) -> int:
    """0 or USER_ERROR. Raises PeersError where the worker was given up on."""
    if end.is_failure:
        raise PeersError(f"{end.given_up(supervisor.policy)}\nIts log: {supervisor.command.log_path}")
    return USER_ERROR if end.code else 0
