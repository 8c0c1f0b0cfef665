"""Pod specs, offers, orders and listings. Pure data.

Start with spec.py, PodSpec and how it is read from flags and files; pod.py has the data of the provider protocol.
"""
