"""Resources: the folders that come with layerparity, in a source tree and in a wheel alike."""

from __future__ import annotations

from pathlib import Path


def shipped(name: str) -> Path:
    """Return the folder ``conf``, ``experiments`` or ``checkpoints`` that belongs to this code."""
    package = Path(__file__).resolve().parent
    installed = package / name
    return installed if installed.is_dir() else package.parents[1] / name
