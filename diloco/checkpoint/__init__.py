"""Saves a training and restores it. Start with checkpoint.py.

mark.py defines complete.json, which marks a complete checkpoint; restore.py and choice.py choose the one to resume;
store.py keeps checkpoints in a directory or at a URL.
"""
