"""A fleet of pods and the swarm that trains on it.

Start with fleet.py, which sets up rented pods. swarm.py starts peers, keeper.py keeps the swarm that wanted.py
describes, status.py and logs.py show state and output.
"""
