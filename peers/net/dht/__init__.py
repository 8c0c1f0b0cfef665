"""The Hivemind DHT: small expiring records that all peers can read, under keys of the run.

Start with node.py. records.py decides which records are stored and accepted, look_ups.py how long a look-up goes on,
contacts.py which nodes are dialled again.
"""
