"""Runs tests on code that a model has written, in bubblewrap (run.py); inside.py is what runs inside the sandbox."""
