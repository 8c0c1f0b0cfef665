"""Where pods come from: providers behind one protocol. A new one is a file here and a line in registry.py.

Start with protocol.py. hosts.py is for machines that are there anyway, rented.py for clouds.
"""
