"""The worker's end of the swarm, for anybody's training loop.

Start with diloco.py. flat.py says where each parameter lies in a fragment, exchange.py copies it there and back.
"""
