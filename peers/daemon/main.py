"""Runs one peer of the swarm, from its identity to its leaving. The order of its life:

identity -> DHT -> world rank -> mesh -> manifest -> worker -> state -> epochs -> leave
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from peers.admission.service import AdmissionService
from peers.daemon.config import DaemonConfig
from peers.daemon.daemon import Daemon, WorkerFactory
from peers.daemon.link import listen, refuse
from peers.errors import UserError
from peers.net.dht.node import Dht
from peers.net.identity import claim_slot, is_one_more
from peers.net.socket_directory import SocketDirectory
from peers.protocol.reports import Phase

log = logging.getLogger(__name__)


async def run_daemon(
    config: DaemonConfig, *, worker: WorkerFactory | None, on_phase: Callable[[Phase], None] | None = None
) -> int:
    """Be a peer until the training is done. Returns 0, or USER_ERROR where the worker needs its user to act.

    With `worker` the daemon starts and restarts the training itself; without, it waits for a worker on the link.
    `on_phase` is called twice a second with what the peer is doing. Raises UserError for what the user can correct,
    PeersError where it gave up on the worker. When cancelled, it leaves at once.
    """
    # Reductions and outer steps have threads of their own. An OpenMP pool in each would only slow the workers down.
    torch.set_num_threads(1)
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(SocketDirectory()).path
        link_path = Path(config.link_path) if config.link_path else directory / "link.sock"
        accept = await stack.enter_async_context(listen(link_path))
        try:
            if on_phase is not None:
                on_phase(Phase(name="starting", detail="joining the network"))
            # Reports errors in these files before the peer connects to anything.
            config.secret()
            identity = claim_slot(Path(config.state_dir), config.run_id, config.world_rank)
            stack.callback(identity.release)
            log.info("starting as %s", identity.peer_id)
            if config.world_rank is None and is_one_more(identity):
                log.info(
                    "another peer of this run lives on this machine; this is one more, with a key of its own"
                )
            dht = await Dht.join(
                identity=identity,
                initial_peers=config.initial_peers,
                host_maddrs=config.host_maddrs,
                announce_maddrs=config.announce_maddrs,
            )
            stack.push_async_callback(dht.close)
            admission = AdmissionService(config.run_id, identity, dht, config)
            await admission.enter()
        except UserError as error:
            if worker is None:
                # The user watches the worker, so the worker has to report it.
                await refuse(accept, str(error))
            raise
        daemon = Daemon(config, identity, dht, admission)
        if on_phase is not None:
            daemon.tell_phases(on_phase)
        stack.push_async_callback(daemon.close)
        if config.metrics_port is not None:
            await stack.enter_async_context(daemon.metrics_served(config.metrics_port))
        return await daemon.live(accept, link_path, worker)
