"""Flags and configuration files: their types and limits, a trainer's configuration, and model directories.

Start with flags.py, which defines every field; trainer.py parses them, checks.py has the limits of their values.
"""
