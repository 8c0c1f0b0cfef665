"""A fleet of pods and the swarm that trains on it.

Start with fleet.py, what is done with pods once they are rented; swarm.py starts peers, keeper.py keeps them, status.py
and logs.py look at them.
"""
