"""Capture: from tensors at sites to records on disk."""
