"""libp2p through its daemon p2pd: starting it, talking to it, and the streams it opens.

Start with transport.py; p2pd.py is the process, p2pd_control.py its control protocol.
"""
