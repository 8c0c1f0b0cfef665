"""Assembles a peer's core and runtime, from its configuration and the manifest that the swarm has agreed on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from peers.core.peer import Peer
from peers.core.schedule import Schedule
from peers.core.settings import Settings
from peers.core.weights import Aggregation
from peers.daemon.agreement import Agreement
from peers.daemon.averaging import Averaging
from peers.daemon.config import DaemonConfig, optimizer_of
from peers.daemon.downloads import Downloads
from peers.daemon.pledges import Pledges
from peers.daemon.presence import Presence
from peers.daemon.runtime import Runtime
from peers.daemon.worker_monitor import WorkerMonitor
from peers.net.identity import Identity
from peers.net.paths.network import Network
from peers.net.streams import StreamPool
from peers.protocol.certificates import verify_signature
from peers.reduce.all_reduce import OVERLAPPED_NICENESS
from peers.threads import give_way


def assembled(
    config: DaemonConfig,
    agreement: Agreement,
    *,
    identity: Identity,
    presence: Presence,
    network: Network,
    pool: StreamPool,
    monitor: WorkerMonitor,
    incarnation: int,
    founders_timeout_s: float,
    on_change: Callable[[], None],
) -> Runtime:
    """`founders_timeout_s` is the time left to wait for the run's first peers."""
    manifest = agreement.manifest
    schedule, aggregation = Schedule.of(manifest), Aggregation.of(manifest)
    codec, optimizer_for = str(manifest.get("hv.compression") or "fp32"), partial(optimizer_of, manifest)
    niceness = OVERLAPPED_NICENESS if schedule.overlap_steps else 0
    if niceness:
        give_way(niceness)
    pledges = Pledges(identity.path.with_suffix(".pledges"))
    core = Peer(
        keys=identity,
        verify=verify_signature,
        settings=Settings(
            manifest=agreement.digest,
            steps_per_epoch=schedule.steps_per_epoch,
            num_fragments=schedule.num_fragments,
            epoch_s=schedule.seconds_per_epoch,
            never_waits=schedule.never_waits,
            aggregation=aggregation,
            quorum=config.quorum,
            grace_s=config.grace_s,
            attempt_timeout_s=config.averaging_timeout or math.inf,
            galaxy_size=presence.galaxy_size,
            founders_timeout_s=founders_timeout_s,
        ),
        incarnation=incarnation,
        world_rank=presence.world_rank,
        pledges=pledges.attempts,
        now=time.monotonic(),
    )
    averaging = Averaging(
        me=identity.peer_id,
        codec=codec,
        local_steps=schedule.local_steps,
        aggregation=aggregation,
        niceness=niceness,
        pool=pool,
        optimizer_for=optimizer_for,
        timing=core.timing,
        is_live=core.swarm.is_live,
        forwarded_bytes=lambda: network.forwarded_bytes,
    )
    downloads = Downloads(
        config.run_id,
        network.paths,
        codec=codec,
        optimizer_for=optimizer_for,
        on_received=lambda received: setattr(monitor.activity, "received", received),
    )
    return Runtime(
        core,
        mesh=presence.mesh,
        averaging=averaging,
        pledges=pledges,
        downloads=downloads,
        on_change=on_change,
        on_tell=lambda tell: monitor.journal.happened(time.time(), tell.text),
    )
