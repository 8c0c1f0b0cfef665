"""The worker's end of the swarm, for any training loop.

Start with diloco.py. layout.py says where each parameter lies in a fragment, exchange.py copies it there and back.
"""
