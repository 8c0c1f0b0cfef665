"""Saves a training and restores it. Start with checkpoint.py.

mark.py defines complete.json, which marks a complete checkpoint; finder.py and choice.py choose the one to resume;
store.py is the interface to where they lie, local.py and remote.py its two kinds, opened.py chooses between them.
"""
