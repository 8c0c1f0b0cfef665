"""Benchmarks behind every performance claim: one command each, with JSON output.

Start with record.py, the format of results; table.py renders them as README.md. lab/ is a simulated network for some.
"""
