"""All orders made from this machine, written to disk before every request that costs money.

Start with row.py, one order and its states; ledger.py reads and writes the file of them, lock.py locks it.
"""
