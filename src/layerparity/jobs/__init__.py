"""Jobs: one file per job; each has a one-line docstring and a run(config) function."""
