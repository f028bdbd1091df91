"""Tracking: the only room that imports mlflow."""
