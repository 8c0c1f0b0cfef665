"""A peer of the swarm as one process on asyncio: it carries out what the core decides.

main.py starts a peer. Work comes in over the worker's link (link.py, host.py), runtime.py carries the core's
effects out, and averaging.py computes. coordinator.py is the process with which a run begins.
"""
