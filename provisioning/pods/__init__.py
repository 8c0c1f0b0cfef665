"""Pod specs, offers, orders, pods and listings. Pure data.

Start with spec.py, PodSpec and how it is read from flags and files. pod.py has what providers answer, and one order of
a pod, with its states.
"""
