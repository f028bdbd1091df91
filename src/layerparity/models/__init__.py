"""Models: reading checkpoints, building skeletons, and what is known of each family."""
