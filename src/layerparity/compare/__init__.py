"""Compare: from two runs' records to rows, a verdict and a report."""
