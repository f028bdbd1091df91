"""The port and the backend that a configuration names, checked and opened."""
