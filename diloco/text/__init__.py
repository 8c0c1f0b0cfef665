"""From documents to batches of tokens (diloco/data.py is what trainers use)."""
