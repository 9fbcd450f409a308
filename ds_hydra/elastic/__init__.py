"""A job whose ranks may die and join: who trains together (views), how they agree on it, and who is told."""
