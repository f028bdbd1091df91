"""Model: reading checkpoints, building skeletons, filling them stage by stage."""
