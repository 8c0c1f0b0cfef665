"""The outer state from one peer to another: whole (transfer.py), or the commits since (replay.py); server.py serves."""
