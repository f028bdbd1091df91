"""A stand-in of AWS's package: nothing but a version, which a test may change."""

import os

__version__ = os.environ.get("STAND_IN_TORCH_NEURONX", "2.9.0+stand-in")
