"""Reinforcement: tasks and their rewards, rollouts, and the servers that write completions."""
