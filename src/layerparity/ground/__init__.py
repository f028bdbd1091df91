"""Ground: ways to end, what a command says, whole files, plug-ins by name, the clock of a run."""
