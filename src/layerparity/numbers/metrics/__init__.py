"""Metrics: one file per metric, each a number that says how far a candidate is from a golden."""
