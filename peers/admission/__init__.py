"""Who may be in a run, and as which rank: secrets, tokens, ban lists, the ledger of world ranks.

Start with service.py, what a peer does about its token; issuer.py gives tokens, ranks.py world ranks. The decision
itself is in core/admission.py, and the doors ask it through net/gate.py.
"""
