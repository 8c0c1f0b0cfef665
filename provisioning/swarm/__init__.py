"""The swarm that trains on rented pods.

Start with swarm.py, which starts it. While no command runs, watcher.py ends rentals, and keeper.py keeps the swarm as
it was asked for. status.py and logs.py show state and output.
"""
