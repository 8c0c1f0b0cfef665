"""How bytes get to a peer: TCP with TLS, libp2p, or a third peer that forwards.

Start with paths.py, which chooses. direct.py, relay.py and ../libp2p are the ways; greeting.py begins a connection.
"""
