"""libp2p's daemon p2pd: starting it, talking to it, and the streams it opens. Start with transport.py."""
