"""Mutations: faults that no rule was written for, drawn by a seed over site, kind and size."""
