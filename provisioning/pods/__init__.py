"""Pod specs, offers, orders, pods and listings. Pure data.

Start with pod.py: PodSpec and how it is made from flags and tables, the answers of providers, and Row, one order of a
pod with its states. tables.py reads tables of TOML files.
"""
