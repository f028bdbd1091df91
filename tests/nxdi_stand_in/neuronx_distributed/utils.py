"""What kind of machine this process computes on."""

from __future__ import annotations

import os


def cpu_mode() -> bool:
    """Return whether layers compute on the CPU, with gloo's collectives."""
    return os.environ.get("NXD_CPU_MODE") == "1"
