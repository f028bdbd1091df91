"""Tolerances: one file per table of limits; picked by name with tolerance=NAME."""
