"""What crosses the network: message structs with their limits in the types, certificates, signatures.

Start with messages.py (what peers say to each other), then certificates.py (the chain that they sign).
"""
