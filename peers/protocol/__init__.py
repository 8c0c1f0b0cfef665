"""What crosses the network: message structs with their limits in the types, certificates, signatures.

Start with messages.py (what peers say about the run), then certificates.py (the chain that they sign). mesh.py is all
that one channel of the mesh carries, records.py what the DHT holds, admission.py and ranks.py what newcomers ask for.
"""
