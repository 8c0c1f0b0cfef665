"""Real daemons under minutes of random faults: what they get done, and whether every guarantee holds.

Start with run.py, one such run; plan.py draws the faults from a seed. virtual.py is the same on a simulated clock.
"""
