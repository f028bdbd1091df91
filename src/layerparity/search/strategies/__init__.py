"""Strategies: one file per way to find the wrong block; picked with job.strategy=NAME."""
