"""Renting pods and giving them back, so that no pod is forgotten, whichever process dies.

Start with plan.py and reconcile.py, the two pure decisions. account.py asks one provider about the pods of one ledger;
renter.py carries out decisions at one provider, renters.py at all; operations.py has further commands.
"""
