"""Rooms of the gpu backend; imported only when it is built, or when a placement is planned."""

import os

# accelerate imports torch_xla wherever it is installed: 6 s, a warning and a root log handler. It
# reads this once, when it is imported itself; where that has happened already this does nothing.
os.environ["USE_TORCH_XLA"] = "0"
