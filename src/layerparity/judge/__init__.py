"""Judge: from two runs' records to rows and a verdict."""
