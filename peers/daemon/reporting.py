"""What a daemon reports to observers: its journal, and the current state of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from peers.core.schedule import Schedule
from peers.daemon.agreement import Agreement
from peers.daemon.config import codec_of
from peers.daemon.rollout_service import RolloutService
from peers.daemon.runtime import Runtime
from peers.daemon.worker_monitor import WorkerMonitor
from peers.monitor.journal import printable
from peers.monitor.observations import Observations
from peers.monitor.summary import summary_of
from peers.net.identity import Identity
from peers.net.mesh import Mesh
from peers.net.paths.network import Network
from peers.protocol.records import Announcement
from peers.protocol.reports import (
    MAX_CERTIFICATE_BYTES,
    MAX_HARDWARE_CHARACTERS,
    MAX_SEEN,
    Certified,
    Figures,
    Report,
)


class Reporting:
    """Reads a daemon's parts, from its event loop. `describe` gives its announcement, `runtime` its runtime once it has
    one.
    """

    def __init__(
        self,
        *,
        hardware: str,
        identity: Identity,
        describe: Callable[[], Announcement],
        agreement: Agreement,
        monitor: WorkerMonitor,
        mesh: Mesh,
        network: Network,
        rollouts: RolloutService,
        runtime: Callable[[], Runtime | None],
    ) -> None:
        self._hardware = printable(hardware)[:MAX_HARDWARE_CHARACTERS]
        self._identity, self._describe, self._runtime = identity, describe, runtime
        self._agreement, self._monitor, self._rollouts = agreement, monitor, rollouts
        self._mesh, self._network = mesh, network
        self._certified: Certified | None = None

    def figures(self) -> Figures:
        journal, runtime = self._monitor.journal, self._runtime()
        figures = Figures(
            loss=journal.loss,
            hardware=self._hardware,
            steps_per_epoch=0,
            num_rounds=journal.num_rounds,
            num_failures=journal.num_failures,
            num_worker_losses=journal.num_worker_losses,
            sent_bytes=journal.sent_bytes,
            received_bytes=journal.received_bytes,
            forwarded_bytes=self._network.forwarded_bytes,
            upload_bytes_per_s=journal.upload_bytes_per_s,
            download_bytes_per_s=journal.download_bytes_per_s,
            link_bytes_per_s=runtime.averaging.bandwidth.bytes_per_s if runtime else 0.0,
        )
        if not self._agreement.digest:
            return figures
        manifest = self._agreement.manifest
        schedule = Schedule.of(manifest)
        return replace(
            figures,
            steps_per_epoch=schedule.steps_per_epoch,
            end_step=self._monitor.end_step,
            step_s=self._monitor.step_s,
            compression=codec_of(manifest),
            overlaps=schedule.overlap_steps != 0,
            overlap_steps=schedule.hidden_steps,
        )

    def report(self, since: float) -> Report:
        """A report, with the entries after `since` (Unix time)."""
        journal, certified = self._monitor.journal, self._newest_certified()
        return Report(
            status=self._describe().encode(self._identity),
            figures=self.figures(),
            standing=self._monitor.standing,
            sees=tuple(peer.peer_id for peer in self._mesh.peers[:MAX_SEEN]),
            points=tuple(journal.curve.since(since)),
            rounds=tuple(entry for entry in journal.rounds if entry.time > since),
            incidents=tuple(incident for incident in journal.incidents if incident.time > since),
            certified=certified if certified is not None and certified.time > since else None,
            phase=self._monitor.phase,
            evaluations=tuple(one for one in journal.evaluations if one.time > since),
            troubles=tuple(journal.troubles.values()),
            rollout_peers=self._rollouts.senders_shown(),
        )

    def _newest_certified(self) -> Certified | None:
        runtime, known = self._runtime(), self._certified
        certificate = runtime.state.header.certificate if runtime and runtime.state else None
        if certificate is None or certificate.num_bytes > MAX_CERTIFICATE_BYTES:
            return None
        if known is None or known.certificate.head != certificate.head:
            self._certified = Certified(time=time.time(), certificate=certificate)
        return self._certified

    def as_swarm(self) -> dict[str, Any]:
        """The swarm as this peer sees it, in the form of peers/monitor/summary.py, with figures of itself only."""
        observations, own, now = Observations(), self._describe(), time.monotonic()
        for peer in self._mesh.peers:
            observations.announced(peer, now)
        observations.reported(own, self.report(0.0), now)
        return summary_of(own.run_id, observations, now=now, unix_now=time.time())
