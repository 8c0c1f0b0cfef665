"""Pod specs, offers, orders, pods and listings. Pure data.

Start with pod.py: PodSpec and how it is made from flags and tables, what providers answer, and one order of a pod, with
its states. tables.py reads tables of TOML files.
"""
