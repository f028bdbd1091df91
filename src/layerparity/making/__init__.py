"""Making a run: scope, inputs, stages, references, sweeps."""
