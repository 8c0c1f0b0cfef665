"""Every performance claim, one command each, JSON out.

Start with record.py, what a benchmark writes; table.py makes README.md of it. lab/ is the network that some run in.
"""
