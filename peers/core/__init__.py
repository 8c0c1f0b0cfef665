"""The peer as a pure machine: `handle(event, now) -> effects` and `deadline`. No I/O, no clock, no torch.

Start with peer.py. The leader rule and the rest of a round are in round.py, what a plan must be in plans.py, which of
two chains counts in chain.py, who is well in health.py, and every waiting time in timing.py.
"""
