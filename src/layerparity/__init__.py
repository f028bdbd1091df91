"""Layer-by-layer numerical parity between two machines that run the same language model."""

__version__ = "0.1.0"
