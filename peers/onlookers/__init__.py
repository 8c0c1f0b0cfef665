"""What peers tell those who look on, and how a whole swarm looks to an observer."""
