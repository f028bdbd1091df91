"""Plan: whether a model fits a machine, from its architecture alone, before a weight is read."""
