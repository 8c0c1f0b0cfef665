"""Who may be in a run, and as which rank: secrets, tokens, ban lists, the ledger of world ranks.

Start with service.py, which keeps a process's token valid; issuer.py issues tokens, ranks.py assigns world ranks. The
decision itself is in net/gate.py, which every part that accepts peers asks.
"""
