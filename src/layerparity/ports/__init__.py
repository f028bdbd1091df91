"""Ports: what runs a stage of a model, ours and a user's own, by one contract."""
