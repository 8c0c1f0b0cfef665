"""The network: who a peer is, how peers find each other, and how bytes get from one to another.

Start with mesh.py (how peers hear from one another) and streams.py (what rounds move their bytes over). libp2p/ runs
libp2p's daemon, dht/ finds peers, paths/ chooses the path to a peer, states/ transfers the outer state. All waiting
times are in timing.py.
"""
