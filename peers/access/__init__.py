"""Who may be in a run: secrets, tokens, ban lists, and the doors where they are asked for."""
