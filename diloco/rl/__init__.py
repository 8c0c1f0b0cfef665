"""Reinforcement by GRPO: tasks and their rewards, rollouts, and the servers that write completions.

Start with trainer.py; tasks.py says what a task is. rollouts.py asks servers for completions by the weights of push.py.
"""
