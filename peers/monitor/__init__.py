"""What people and programs are told: of this peer, and of the whole swarm.

Start with reporting.py, what a peer says of itself; observer.py is who asks all of them (`diloco status`, the
dashboard), and summary.py what it makes of the answers. phases.py says what a peer is doing and when it will be done,
verdict.py in one sentence whether all is well.
"""
