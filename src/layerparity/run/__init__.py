"""Run: from a scope of a model to a run on disk: backends, ports, inputs, stages."""
