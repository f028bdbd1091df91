"""Audit: what a checkpoint holds, what is wrong with it, and what converting it would cost."""
