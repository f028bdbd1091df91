"""What a run is asked for: its scope, its inputs, the golden that feeds it."""
