"""The doors: from a command line to a job and an exit status, from Python to what was made."""
