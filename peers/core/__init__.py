"""The peer as a pure machine: `handle(event, now) -> effects` and `deadline`. No I/O, no clock, no torch.

Start with peer.py. The four rules: who leads is in round.py, who is in a commit in group.py (and what its plan must be
in plans.py), which of two chains counts in chain.py, what becomes of late work in late_work.py. Who is well is in
health.py, and every waiting time in timing.py.
"""
