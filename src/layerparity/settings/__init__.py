"""Settings: every key of a command, its type, its default and what it does."""
