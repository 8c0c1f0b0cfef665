"""Runs one peer of the swarm; `python -m peers.daemon.main` runs it in a process of its own.

The order of its life:

identity -> DHT -> world rank -> mesh -> manifest -> worker -> state -> epochs -> leave
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from peers.admission.service import AdmissionService
from peers.daemon.config import DaemonConfig
from peers.daemon.daemon import Daemon, WorkerFactory
from peers.daemon.link import listen, refuse
from peers.errors import PeersError, UserError
from peers.net.dht.node import Dht, load_hivemind
from peers.net.identity import claim_slot, is_one_more
from peers.net.socket_directory import SocketDirectory
from peers.protocol.reports import Phase
from peers.tasks import until_signal
from peers.timing import PROBE_S, STOP_S

_MAX_CONFIG_BYTES = 1 << 24
_CLEAN_UP_TIMEOUT_S = STOP_S + PROBE_S
log = logging.getLogger("peers.daemon.main")


async def run_daemon(
    config: DaemonConfig, *, worker: WorkerFactory | None, on_phase: Callable[[Phase], None] | None = None
) -> int:
    """Be a peer until the training is done. Returns 0.

    With `worker` the daemon starts and restarts the training itself; without, it waits for a worker on the link.
    `on_phase` is called twice a second with what the peer is doing. Raises UserError for what the user can correct,
    with the worker's words if it has told that, and PeersError where nobody answered or it gave up on the worker. When
    cancelled, it leaves at once.
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
            # Errors in these files are reported before the peer connects to anything.
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
        except PeersError as error:
            if worker is None:
                # The user watches the worker, so the worker has to report it.
                await refuse(accept, error)
            raise
        daemon = Daemon(config, identity, dht, admission)
        stack.push_async_callback(daemon.close)
        if config.metrics_port is not None:
            await stack.enter_async_context(daemon.metrics_served(config.metrics_port))
        await daemon.live(accept, link_path, worker, on_phase)
        return 0


def main() -> int:
    """The daemon of a worker that was started first, configured by JSON on stdin. Returns the exit code: 0 done, 2 for
    what the user can correct (the worker reports it), 1 for any other failure, 128 + n for a signal."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    # This takes seconds, during which an event loop would not react to signals.
    load_hivemind()
    try:
        text = sys.stdin.buffer.read(_MAX_CONFIG_BYTES)
        config = msgspec.json.decode(text, type=DaemonConfig)
        # The worker's death sends a SIGTERM, too; the daemon then leaves the swarm.
        return asyncio.run(until_signal(run_daemon(config, worker=None), _CLEAN_UP_TIMEOUT_S))
    except UserError as error:
        log.error("%s", error)
        return 2
    except PeersError:
        log.exception("the daemon failed")
        return 1


if __name__ == "__main__":
    sys.exit(main())
