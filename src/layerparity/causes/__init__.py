"""Causes: one file per known cause of a wrong block; each judges what a comparison saw."""
