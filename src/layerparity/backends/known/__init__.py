"""Backends: one file per kind of machine; the only rooms that touch cuda, xla or neuron."""
