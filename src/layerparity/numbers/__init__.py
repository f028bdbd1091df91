"""Numbers: metrics of two tensors, noise floors, and clean ways to compute the same thing."""
