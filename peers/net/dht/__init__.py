"""The Hivemind DHT: small expiring records that all peers can read, under keys of the run.

Start with node.py. records.py says which records are stored, accepted and asked for, contacts.py which
nodes are dialled again.
"""
