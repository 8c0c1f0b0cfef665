"""What is kept of a training, and how it goes on from there. Start with checkpoint.py, which saves and restores one.

mark.py makes a checkpoint whole, finder.py and choice.py say which to resume, store.py and remote.py where they lie.
"""
