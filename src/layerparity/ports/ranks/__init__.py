"""Rank processes: one process a rank, driven in lock step by the run that started them."""
