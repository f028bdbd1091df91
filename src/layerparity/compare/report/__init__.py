"""The report of a comparison: an HTML page, Markdown, and tables for the terminal and MLflow."""
