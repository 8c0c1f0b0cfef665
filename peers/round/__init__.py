"""The parts of a round: what peers/rounds.py decides with, and what peers/averaging.py carries out."""
