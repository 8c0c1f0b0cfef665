"""A fleet of pods and the swarm that trains on it.

Start with fleet.py, the whole way; swarm.py starts peers, status.py and logs.py look at them.
"""
