"""Peers, coordinators and trainers as processes: on this machine, as workers of Ray, several seeds side by side.

Start with local_swarm.py, a swarm on this machine; worker.py is how a trainer under torchrun finds its daemon.
"""
