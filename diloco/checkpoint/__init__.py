"""Saves a training and restores it. Start with checkpoint.py.

mark.py defines complete.json, which marks a complete checkpoint; restore.py and choice.py choose the one to resume;
store.py is where they are kept, a directory or a URL.
"""
