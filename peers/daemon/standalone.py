"""Runs a daemon whose worker was started first: `python -m peers.daemon.standalone`, configured by JSON on stdin."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import msgspec

from peers.daemon.config import DaemonConfig
from peers.daemon.main import run_daemon
from peers.errors import PeersError, UserError
from peers.net.dht.node import load_hivemind
from peers.timing import PROBE_S, STOP_S

_MAX_CONFIG_BYTES = 1 << 24
_CLEAN_UP_TIMEOUT_S = STOP_S + PROBE_S
log = logging.getLogger(__name__)


def main() -> int:
    """Returns the exit code: 0 done, 2 for what the user can correct (the worker reports it), 1 for any other failure,
    128 + n for a signal."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    # This takes seconds, during which an event loop would not react to signals.
    load_hivemind()
    try:
        text = sys.stdin.buffer.read(_MAX_CONFIG_BYTES)
        return asyncio.run(_until_signal(msgspec.json.decode(text, type=DaemonConfig)))
    except UserError as error:
        log.error("%s", error)
        return 2
    except PeersError:
        log.exception("the daemon failed")
        return 1


async def _until_signal(config: DaemonConfig) -> int:
    """Run the daemon. On SIGTERM, which the worker's death also sends, or SIGINT it leaves the swarm by a deadline."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(run_daemon(config, worker=None))
    caught: list[int] = []

    def leave(number: int) -> None:
        caught.append(number)
        task.cancel()
        # At the deadline the kernel ends this process, and p2pd dies with it.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _CLEAN_UP_TIMEOUT_S)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave, number)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + caught[0] if caught else 1


if __name__ == "__main__":
    sys.exit(main())
