"""All orders made from this machine, written to disk before every request that costs money.

ledger.py reads and writes the state file, with one row for each order (pods/pod.py); lock.py locks the file; keys.py
lists the keys of all other values that are stored there.
"""
