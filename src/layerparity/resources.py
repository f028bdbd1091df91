"""Resources: the folders and files that come with layerparity, in a source tree and in a wheel."""

from __future__ import annotations

from pathlib import Path


def shipped(name: str) -> Path:
    """Return ``conf``, ``experiments``, ``checkpoints`` or ``constraints.txt`` of this code."""
    package = Path(__file__).resolve().parent
    installed = package / name
    return installed if installed.exists() else package.parents[1] / name
