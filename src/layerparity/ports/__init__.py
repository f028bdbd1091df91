"""Ports: one file per implementation that can be run and judged."""
