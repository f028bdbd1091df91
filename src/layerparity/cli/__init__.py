"""The door: from a command line to a job and an exit status."""
