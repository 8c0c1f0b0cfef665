"""The outer state (peers/outer_state.py) on its way to a disk, and to peers that lack it or its last commits."""
