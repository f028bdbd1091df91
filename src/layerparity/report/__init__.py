"""Report: every sentence and figure that a person reads of a comparison."""
