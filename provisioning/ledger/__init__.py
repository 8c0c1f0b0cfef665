"""All orders made from this machine, written to disk before every request that costs money.

ledger.py reads and writes the file of them, one row each (pods/pod.py); lock.py locks it; keys.py has the
keys of what is stored besides.
"""
