"""One peer: its parts, what it shows of itself, which messages reach it, and its life from joining to leaving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from peers.admission.service import AdmissionService
from peers.core import events
from peers.core.peer import Peer
from peers.core.schedule import Schedule
from peers.core.settings import Settings
from peers.core.weights import Aggregation
from peers.daemon.agreement import Agreement
from peers.daemon.averaging import Averaging
from peers.daemon.config import DaemonConfig
from peers.daemon.downloads import fetch_state
from peers.daemon.host import WorkerHost
from peers.daemon.link import Accept
from peers.daemon.pledges import Pledges
from peers.daemon.presence import Presence
from peers.daemon.reporting import Reporting
from peers.daemon.rollout_service import RolloutService
from peers.daemon.runtime import Runtime
from peers.daemon.supervisor import Supervisor, WorkerCommand
from peers.daemon.trainers import Trainers
from peers.daemon.worker_monitor import WorkerMonitor
from peers.errors import PeersError, UserError
from peers.monitor.prometheus import metrics_served
from peers.monitor.report_service import ReportService
from peers.net.dht.node import Dht
from peers.net.identity import Identity
from peers.net.mesh import Mesh
from peers.net.paths.network import Network
from peers.net.paths.reachability import Reachability
from peers.net.states.server import StateServer
from peers.net.streams import StreamPool
from peers.protocol.certificates import verify_signature
from peers.protocol.mesh import Scalar
from peers.protocol.records import NO_RANK, Announcement, Lost, Spoken
from peers.protocol.reports import Phase
from peers.protocol.rollouts import rollout_protocol
from peers.state.outer_state import OuterState
from peers.tasks import cancelled
from peers.timing import BEAT_S

log = logging.getLogger(__name__)

T = TypeVar("T")

WorkerFactory = Callable[[Mapping[str, Scalar], bool, int, Path], WorkerCommand]
"""(manifest, whether it is this peer's own, world rank, link socket) -> the command that trains."""


class Daemon:
    """Owns one peer's parts, and connects them to one another."""

    def __init__(
        self, config: DaemonConfig, identity: Identity, dht: Dht, admission: AdmissionService
    ) -> None:
        self._config, self._dht, self._identity, self._admission = config, dht, identity, admission
        self._incarnation = time.time_ns()
        self._tasks: list[asyncio.Task[Any]] = []
        self._runtime: Runtime | None = None
        self._news: tuple[str, str, int] | None = None
        self._trainers = Trainers()
        self._network = Network(
            run_id=config.run_id,
            identity=identity,
            libp2p=dht.transport,
            settings=config,
            peers=lambda: self._presence.mesh.peers,
            gate=admission.gate,
        )
        self._reachability = Reachability(config.run_id, identity, dht.transport, admission.gate)
        paths = self._network.paths
        self._presence = Presence(
            run_id=config.run_id,
            identity=identity,
            dht=dht,
            mesh=Mesh(
                run_id=config.run_id,
                peer_id=identity.peer_id,
                transport=paths,
                own_record=self._own_record,
                on_change=lambda: self._presence.view_changed(),
                post=self._post,
                on_manifest=lambda sender, message: self._agreement.received(sender, message),
                gate=admission.gate,
            ),
            galaxy_size=config.galaxy_size,
            describe=self._describe,
            on_change=self._view_changed,
            gate=admission.gate,
        )
        self._presence.on_clock = self._clock_judged
        self._agreement = Agreement(self._presence)
        self._pool = StreamPool(paths, self._network.data_protocol, paths)
        self._deadline = time.monotonic() + config.timeout_waiting_for_peers
        self._monitor = WorkerMonitor(self._presence, self._agreement)
        self._rollouts = RolloutService(
            config.run_id, identity.peer_id, admission.gate, lambda: self._agreement.manifest
        )
        self._host = WorkerHost(self._agreement, self._monitor, self._rollouts)
        self._reporting = Reporting(
            hardware=config.hardware,
            identity=identity,
            describe=self._describe,
            agreement=self._agreement,
            monitor=self._monitor,
            mesh=self._presence.mesh,
            network=self._network,
            rollouts=self._rollouts,
            runtime=lambda: self._runtime,
        )
        self._reports = ReportService(
            config.run_id,
            identity.peer_id,
            dht.transport,
            self._reporting.report,
            secret=admission.secret,
            is_banned=lambda peer_id: peer_id in admission.gate.bans.peer_ids,
        )

    def metrics_served(self, port: int) -> contextlib.AbstractAsyncContextManager[int]:
        """Serve this peer's figures to a Prometheus on this machine while the block runs. Gives the port."""
        return metrics_served(port, self._reporting.as_swarm, lambda: self._describe().world_rank)

    async def live(
        self,
        accept: Accept,
        link_path: Path,
        worker: WorkerFactory | None,
        on_phase: Callable[[Phase], None] | None,
    ) -> None:
        """Live as a peer, between joining the DHT and leaving it.

        Raises the error of any part of the daemon that ends before the training.
        """
        if on_phase is not None:
            self._spawn(self._tell_phases(on_phase))
        self._spawn(self._host.serve(accept))
        self._spawn(self._dht.fail_with_p2pd())
        self._spawn(self._admission.run())
        try:
            runtime = await self._until_done(self._join())
        except PeersError as error:
            # The user may watch the worker, so the worker reports it too.
            await self._host.refuse(error, wait=worker is None)
            raise
        await self._until_done(self._train(runtime, link_path, worker))

    async def _join(self) -> Runtime:
        """Enter the swarm, and agree with it. Raises UserError, and PeersError where trying again may help."""
        await self._enter()
        self._monitor.preparing = "agreeing with the swarm"
        await self._agreement.reach(self._config.manifest, self._config.named, deadline=self._deadline)
        log.info("agreed on the manifest %s", self._agreement.digest[:12])
        self._monitor.preparing = "the training process"
        runtime = self._runtime = self._new_runtime()
        peers = self._presence.mesh.peers
        for peer in peers:
            runtime.post(events.Connected(peer.peer_id))
        statuses = tuple((peer.peer_id, peer.status) for peer in peers if peer.status is not None)
        runtime.post(events.StatusesReceived(statuses))
        self._spawn(runtime.run())
        server = StateServer(
            self._network.paths, self._config.run_id, self._current_state, runtime.averaging.commit_log
        )
        await server.start()
        gate = self._admission.gate
        gate.on_bans.append(lambda: server.drop(gate.bans.peer_ids))
        return runtime

    async def _tell_phases(self, on_phase: Callable[[Phase], None]) -> None:
        while True:
            on_phase(self._monitor.phase)
            await asyncio.sleep(BEAT_S)

    async def _enter(self) -> None:
        """Take this peer's place in the swarm. Raises as `_join`."""
        await self._network.start()
        await self._reachability.start()
        await self._presence.enter(self._config.world_rank)
        log.info("joined the swarm; other peers: %d", len(self._presence.view) - 1)
        for maddr in self._presence.maddrs[:1]:
            log.info("peers can also join through this one: --initial-peers %s", maddr)
        self._spawn(self._presence.announce_forever())
        await self._reports.start()
        await self._dht.transport.serve(rollout_protocol(self._config.run_id), self._rollouts.handle)
        await self._pool.start()

    async def _until_done(self, stage: Coroutine[Any, Any, T]) -> T:
        """Wait for this stage. Raises the error of any part of the daemon that ends before it."""
        done = asyncio.create_task(stage)
        try:
            await asyncio.wait({done, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
                    raise PeersError(f"a part of the daemon ended early: {task}")
            return done.result()
        finally:
            # The worker ends first: until then its link and the core serve it.
            await cancelled([done])

    def _spawn(self, part: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.create_task(part))

    async def _train(self, runtime: Runtime, link_path: Path, worker: WorkerFactory | None) -> None:
        """Train as soon as this peer has a world rank, until the worker command is over or, without one, until a worker
        says that it has finished. Raises PeersError where the worker was given up on, UserError where its user must act
        or it never joined.
        """
        core = runtime.core
        while core.world_rank == NO_RANK:
            await self._presence.wait_for_change()
        log.info("training as world rank %d", core.world_rank)
        self._host.may_train(runtime)
        if worker is None:
            await self._host.finished.wait()
            return
        # In a thread: `worker` may read all of a model's weights.
        command = await asyncio.to_thread(
            worker, self._agreement.manifest, self._agreement.is_own, core.world_rank, link_path
        )
        supervisor = Supervisor(command)
        self._monitor.on_progress = supervisor.restarts.progressed
        self._monitor.on_commit = lambda is_last: supervisor.restarts.committed(is_last=is_last)
        await supervisor.run_to_its_end()
        if not self._host.has_met_worker:
            raise UserError(
                "the program ended without calling diloco.Diloco(model) or using DilocoCallback, so it never joined "
                f"the swarm. Is --worker the right program? Its log: {command.log_path}"
            )

    async def close(self) -> None:
        """Leave the swarm, whatever the reason. The others are told, so that they do not wait for this peer."""
        await cancelled(self._tasks)
        if self._presence.maddrs:
            log.info("leaving the swarm")
            others = self._presence.view.keys() - {self._identity.peer_id}
            if self._current_state() is not None and not others and not self._host.finished.is_set():
                log.warning(
                    "this was the last peer: without checkpoints (--ckpt.interval) the progress of the run is lost"
                )
            self._monitor.state = "leaving"
            self._reports.changed()
            await self._presence.leave()
        await self._pool.close()
        await self._presence.mesh.close()
        await self._network.close()

    def _new_runtime(self) -> Runtime:
        """By the configuration, and the manifest that the swarm has agreed on."""
        config, manifest, presence = self._config, self._agreement.manifest, self._presence
        schedule = Schedule.of(manifest)
        pledges = Pledges(self._identity.path.with_suffix(".pledges"))
        core = Peer(
            keys=self._identity,
            verify=verify_signature,
            settings=Settings(
                manifest=self._agreement.digest,
                steps_per_epoch=schedule.steps_per_epoch,
                num_fragments=schedule.num_fragments,
                samples_per_block=schedule.samples_per_block or 1,
                epoch_s=schedule.seconds_per_epoch,
                overlap_steps=max(0, schedule.overlap_steps),
                never_waits=schedule.never_waits,
                aggregation=Aggregation.of(manifest),
                quorum=config.quorum,
                grace_s=config.grace_s,
                attempt_timeout_s=config.averaging_timeout or math.inf,
                galaxy_size=presence.galaxy_size,
                founders_timeout_s=max(0.0, self._deadline - time.monotonic()),
            ),
            incarnation=self._incarnation,
            world_rank=presence.world_rank,
            pledges=pledges.attempts,
            now=time.monotonic(),
        )
        return Runtime(
            core,
            mesh=presence.mesh,
            averaging=Averaging(
                core, manifest, pool=self._pool, forwarded_bytes=lambda: self._network.forwarded_bytes
            ),
            pledges=pledges,
            fetch=partial(
                fetch_state,
                run_id=config.run_id,
                transport=self._network.paths,
                manifest=manifest,
                on_received=lambda received: setattr(self._monitor, "received", received),
            ),
            on_change=self._core_changed,
            on_tell=lambda tell: self._monitor.journal.happened(time.time(), tell.text),
        )

    def _core_changed(self) -> None:
        assert self._runtime is not None
        core = self._runtime.core
        news = core.head, core.phase, core.world_rank
        if news != self._news:
            self._news = news
            self._presence.publish()
            self._reports.changed()

    # What this peer shows of itself, and what reaches it

    def _describe(self) -> Announcement:
        state = self._current_state()
        return Announcement(
            peer_id=self._identity.peer_id,
            world_rank=self._runtime.core.world_rank if self._runtime else self._presence.world_rank,
            run_id=self._config.run_id,
            incarnation=self._incarnation,
            state=self._monitor.state,
            epoch=state.epoch if state else 0,
            head=state.head if state else "",
            step=self._monitor.step,
            local_step=self._monitor.local_step,
            step_s=self._monitor.step_s,
            committed_tokens=state.header.committed_tokens if state else 0,
            tokens_per_s=self._monitor.tokens_per_s,
            anchor_digest=state.anchor_digest if state else "",
            manifest_digest=self._agreement.digest,
            maddrs=self._presence.maddrs,
            time=time.time(),
            endpoints=self._network.endpoints(self._presence.maddrs),
            paths=self._network.paths_shown(),
            token=self._admission.token,
        )

    def _own_record(self, number: int, lost: tuple[Lost, ...]) -> bytes:
        status = self._runtime.status if self._runtime is not None else None
        return Spoken.of(self._describe(), status, number, lost).encode(self._identity)

    def _current_state(self) -> OuterState | None:
        return self._runtime.state if self._runtime is not None else None

    def _view_changed(self) -> None:
        view = self._presence.view
        lost, back = self._trainers.seen(view)
        for rank in back:
            log.info("peer %d is back", rank)
            self._monitor.journal.happened(time.time(), f"peer {rank} is back")
        # A peer that is leaving closes its channels to the others itself.
        if lost and self._runtime is not None and self._monitor.state != "leaving":
            lost_ranks = ", ".join(map(str, lost))
            log.warning("lost peer %s", lost_ranks)
            self._monitor.journal.happened(time.time(), f"lost peer {lost_ranks}")
            if self._config.fail_rank_drop:

                async def fail() -> None:
                    raise PeersError(f"lost peer {lost_ranks}, and --hv.fail-rank-drop is set")

                self._runtime.post(fail)
        self._reports.changed()

    def _clock_judged(self, text: str) -> None:
        log.warning("%s", text or "this machine's clock and the initial peers' agree again")
        self._monitor.is_in_trouble("clock", text)

    def _post(self, event: events.Event) -> None:
        """Pass an event of the mesh to the core, if there is one yet."""
        if isinstance(event, events.Disconnected):
            self._pool.drop(event.peer_id)
        if self._runtime is not None:
            self._runtime.post(event)
