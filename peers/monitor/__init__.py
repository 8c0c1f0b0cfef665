"""What people and programs are told about this peer, and about the whole swarm.

Start with report_service.py, which tells observers what a peer reports about itself (daemon/reporting.py). observer.py
asks all peers (`diloco status`, the dashboard), and summary.py sums up their answers. phases.py says what a peer is
doing and when it will be done, verdict.py in one sentence whether all is well.
"""
