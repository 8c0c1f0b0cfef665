"""Renting and giving back, so that no pod is lost whatever dies: plan, orders, reconciliation.

Start with plan.py and reconcile.py, the two pure decisions. account.py asks one provider about the pods of one ledger,
renter.py carries decisions out there, renters.py at all providers; operations.py is what else is done with pods.
"""
