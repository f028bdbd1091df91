"""Anatomy: addresses of tensors, the structure of a block, and what is known of each family."""
