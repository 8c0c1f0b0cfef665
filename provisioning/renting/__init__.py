"""Renting and giving back, so that no pod is lost whatever dies: plan, orders, reconciliation.

Start with plan.py and reconcile.py, the two pure decisions; renter.py and settler.py carry them out at one provider,
operations.py at all of them.
"""
