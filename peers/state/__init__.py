"""The outer state: anchor and momentum, the outer step, and how they lie in files.

Start with outer_state.py, then outer_optimizer.py (the outer step). handover.py and layout.py say what the daemon and
its workers hand each other.
"""
