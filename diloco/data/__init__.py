"""From documents to batches of tokens, and which of them are whose.

Start with batches.py, which is what trainers use; sampling.py deals the samples out by epoch and world rank.
"""
