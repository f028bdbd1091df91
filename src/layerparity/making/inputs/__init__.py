"""Inputs: one file per source of what a run is fed."""
