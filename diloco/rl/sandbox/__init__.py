"""Runs tests on code that a model has written, in bubblewrap, and counts how many pass.

Start with run.py. isolation.py defines the sandbox, judge.py and answer.py run inside it, wire.py is their protocol.
Inside the sandbox only this folder and the standard library exist, so its modules import nothing else.
"""
