"""The daemon process: the swarm, the round, the outer state. Contains no model code."""
