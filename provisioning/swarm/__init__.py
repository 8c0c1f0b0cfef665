"""The swarm that trains on rented pods.

Start with swarm.py, which starts it. While no command runs, watcher.py ends rentals, and keeper.py keeps the swarm that
wanted.py describes. status.py and logs.py show state and output.
"""
