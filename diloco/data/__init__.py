"""Turns documents into batches of tokens, and divides the samples among peers and ranks.

Start with batches.py, the interface for trainers; sampling.py assigns samples by epoch and world rank.
"""
