"""Compares rollout peers with lock-step training, and measures the cost of stale policies."""
