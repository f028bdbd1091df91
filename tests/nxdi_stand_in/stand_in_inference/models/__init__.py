"""Models, their configurations and their converters."""
