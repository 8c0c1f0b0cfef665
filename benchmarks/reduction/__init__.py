"""The candidates of benchmarks/reduce.py, and the processes they run in.

Start with seats.py, the processes; ours.py and rivals.py are the candidates, vectors.py what they average.
"""
