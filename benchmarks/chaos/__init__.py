"""Runs real daemons under minutes of random faults, measures their goodput, and checks every guarantee.

Start with run.py, one such run; plan.py draws the faults from a seed. virtual.py simulates the same on a virtual clock.
"""
