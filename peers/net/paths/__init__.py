"""How bytes get to a peer: TCP with TLS, libp2p, or a third peer that forwards. Start with paths.py, who chooses."""
