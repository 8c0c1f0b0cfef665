"""The runtime of the core on asyncio: one peer of the swarm as a process.

main.py wires a peer together, runtime.py carries the core's effects out, host.py is the daemon's end of the worker.
"""

from peers.daemon.main import DaemonConfig, optimizer_of, run_daemon

__all__ = ["DaemonConfig", "optimizer_of", "run_daemon"]
