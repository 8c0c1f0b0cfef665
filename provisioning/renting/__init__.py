"""Renting pods and giving them back, so that no pod is forgotten, whichever process dies.

Start with renters.py, all pods of one ledger, and renter.py, one pod at one provider. plan.py chooses offers;
reconcile.py makes the ledger and a provider agree.
"""
