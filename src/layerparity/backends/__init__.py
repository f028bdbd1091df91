"""Backends: where a stage computes, by one contract."""
