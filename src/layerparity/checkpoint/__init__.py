"""Checkpoint: what a checkpoint holds, what is wrong with it, and how to write it anew."""
