"""What streams between peers are made of: libp2p, TCP with TLS, relays; peers/paths.py chooses among them."""
