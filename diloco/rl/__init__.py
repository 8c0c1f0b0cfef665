"""Reinforcement learning by GRPO: tasks and their rewards, rollouts, and the inference servers.

Start with trainer.py; tasks.py defines a task. rollouts.py pushes weights to the servers (push.py) and requests
completions from them.
"""
