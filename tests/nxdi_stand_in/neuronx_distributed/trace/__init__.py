"""How a checkpoint comes to the ranks."""
