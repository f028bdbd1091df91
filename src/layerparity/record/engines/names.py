"""Tensors that a name map explains, whatever made them."""

from __future__ import annotations

from pathlib import Path

from layerparity.record.dump_files import find_tensors
from layerparity.record.engines.base import Captures, Given, by_name
from layerparity.record.name_map import find_map

TITLE = "tensors with a name map"


def matches(folder: Path) -> bool:
    """Say whether a name map lies in a folder."""
    return find_map(folder) is not None


def read(given: Given) -> Captures:
    """Return what the map names. Raises UserError where it names what is not there."""
    return by_name(given, find_tensors(given.folder))
