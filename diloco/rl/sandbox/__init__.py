"""Runs code that a model has written on tests, in bubblewrap, and says how many of them passed.

Start with run.py. isolation.py says what the processes may do, judge.py and answer.py are what runs inside, wire.py is
what they say to each other. Inside there is this folder and Python's own library: its modules import nothing else.
"""
