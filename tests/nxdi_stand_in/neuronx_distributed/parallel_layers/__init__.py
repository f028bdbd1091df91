"""Layers that ranks share, and who the ranks are."""
