"""What this machine has rented or is about to, on disk before every request that costs money.

Start with row.py, one order and its states; ledger.py is the file of them.
"""
