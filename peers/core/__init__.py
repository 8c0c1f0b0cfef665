"""The peer as a pure state machine: `handle(event, now) -> effects` and `deadline`. No I/O, no clock, no torch.

Start with peer.py. The four rules: the Leader rule is in round.py, the Group rule in group.py (what a plan must be in
plans.py), the Fork rule in chain.py, the Late-work rule in late_work.py. Whose state a peer fetches is decided in
catch_up.py and newcomer.py, who is live in health.py, who is at fault for a failed attempt in blame.py; every timeout
is in timing.py.
"""
