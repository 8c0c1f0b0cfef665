"""World ranks: who gives them, who holds them, and how one is asked for."""
