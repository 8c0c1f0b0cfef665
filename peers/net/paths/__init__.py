"""How bytes get to a peer: TCP with TLS, libp2p, or a third peer that forwards.

Start with paths.py, which chooses. direct.py, relay.py and ../libp2p open streams; greeting.py begins a connection.
"""
