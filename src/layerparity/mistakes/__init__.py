"""Mistakes: one file per known bug: how to plant it, and how to recognise it."""
