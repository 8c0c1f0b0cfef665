"""A daemon whose worker was started first: `python -m peers.daemon.standalone`, its configuration as JSON on stdin."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys

from peers.daemon.config import DaemonConfig
from peers.daemon.main import run_daemon
from peers.errors import PeersError, UserError
from peers.net.dht.node import load_hivemind
from peers.timing import PROBE_S, STOP_S

_MAX_CONFIG_BYTES = 1 << 24
_CLEAN_UP_TIMEOUT_S = STOP_S + PROBE_S
log = logging.getLogger(__name__)


def main() -> int:
    """The exit code: 0 done, 2 the user can mend it (the worker has been told), 1 it failed, 128 + n by a signal."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    # Takes seconds, in which an event loop would not notice a signal.
    load_hivemind()
    try:
        return asyncio.run(_until_signal(_config(sys.stdin.buffer.read(_MAX_CONFIG_BYTES))))
    except UserError as error:
        log.error("%s", error)
        return 2
    except PeersError:
        log.exception("the daemon failed")
        return 1


async def _until_signal(config: DaemonConfig) -> int:
    """Run the daemon; SIGTERM (also the worker's death) and SIGINT make it leave the swarm, by a deadline."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(run_daemon(config, worker=None))
    caught: list[int] = []

    def leave(number: int) -> None:
        caught.append(number)
        task.cancel()
        # The kernel then ends what is left: p2pd dies with this process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _CLEAN_UP_TIMEOUT_S)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave, number)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + caught[0] if caught else 1


def _config(text: bytes) -> DaemonConfig:
    fields = json.loads(text)
    for name in ("initial_peers", "host_maddrs", "announce_maddrs", "announce_data_maddrs"):
        fields[name] = tuple(fields[name])
    fields["named"] = frozenset(fields["named"])
    return DaemonConfig(**fields)


if __name__ == "__main__":
    sys.exit(main())
