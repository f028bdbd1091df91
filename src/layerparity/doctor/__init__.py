"""Doctor: what is right and wrong with a machine, one file per check, each line with its cure."""
