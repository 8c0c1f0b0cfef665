"""Rollout peers against lock-step, and what old policies cost."""
