"""Metrics by subject: each says in one number how far a candidate is from a golden.

A file holds ``METRICS``, by name. Its formulas take sums over the elements of two tensors of any
shape: g is the golden's value, c the candidate's, d = c - g, in float64.
"""
