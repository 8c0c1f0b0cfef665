"""Saves a training and restores it. Start with checkpoint.py.

mark.py defines complete.json, which marks a complete checkpoint; finder.py and choice.py choose the one to resume;
store.py, local.py and remote.py read and write directories and URLs.
"""
