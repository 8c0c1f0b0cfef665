"""Who takes part in benchmarks/reduce.py, and the processes they run in."""
