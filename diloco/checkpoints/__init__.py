"""What a checkpoint is made of (diloco/checkpoint.py saves and restores one): names, marks, shards, places, choices."""
