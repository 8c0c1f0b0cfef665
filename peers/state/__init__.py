"""The outer state: anchor and momentum, the outer step, and the files they are saved in.

Start with outer_state.py, then outer_optimizer.py (the outer step). handover.py and layout.py define what the daemon
and its workers pass to each other.
"""
