"""Bisect: from comparisons to the first wrong place: strategies, descent, delta debugging."""
