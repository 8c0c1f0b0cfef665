"""A peer of the swarm as one process on asyncio: it carries out what core decides.

main.py wires a peer together, runtime.py carries the core's effects out, host.py is the daemon's end of the worker's
link (link.py). coordinator.py is the process that others begin from.
"""
