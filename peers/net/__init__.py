"""Everything between this process and others: who a peer is, how it is found, how bytes get to it.

Start with mesh.py (how peers hear from one another) and streams.py (what rounds move their bytes over). Below:
libp2p/ its daemon, dht/ who is there, paths/ the ways to a peer and the choice among them, states/ moving a state. All
waiting times are in timing.py.
"""
