"""Peers of different speed in one swarm: how busy the fast ones are, what all train together, and how well.

Start reading at __main__.py.
"""
