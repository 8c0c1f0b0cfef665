"""The contenders of benchmarks/reduce.py, and the processes that they run in.

Start with seats.py, the processes; ours.py and rivals.py are the contenders, vectors.py makes the data to average.
"""
