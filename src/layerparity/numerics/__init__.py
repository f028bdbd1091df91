"""Numerics: clean ways to compute the same thing, as contexts around a module's forward."""
