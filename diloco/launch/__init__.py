"""Starts peers, coordinators and trainers as processes: a swarm on this machine, on Ray's nodes, or a sweep of seeds.

Start with local_swarm.py, a swarm on this machine; worker.py connects a trainer under torchrun to its daemon.
"""
