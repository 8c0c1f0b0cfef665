"""Runs a set of trainings on rented pods.

Start with sets.py, which says what is trained where. runs.py runs it; trainers.py makes the trainers' command lines.
"""
