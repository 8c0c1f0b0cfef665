"""What a user says: the types of flags and their limits, a trainer's configuration, models and data by name.

Start with trainer.py, every field of a trainer; flags.py has the types that verbs share, checks.py their limits.
"""
