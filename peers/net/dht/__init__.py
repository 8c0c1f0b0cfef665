"""The Hivemind DHT: who is there, found by keys of the run. Start with node.py."""
