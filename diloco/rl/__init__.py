"""Reinforcement learning by GRPO: tasks and their rewards, rollouts, and the inference server.

Start with trainer.py; tasks.py defines a task. rollouts.py pushes weights (push.py) to the vLLM server and
requests completions from it.
"""
