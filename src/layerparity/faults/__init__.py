"""Faults: mistakes that real ports had, one file each, planted on purpose in a loaded block."""

from __future__ import annotations

from layerparity import registry

MUTATION = "mutation"


def catalogue() -> list[str]:
    """Return the ids of the known faults, sorted: every file but the generator of unforeseen ones.

    ``registry.load("faults", id).FAULT`` is the fault itself.
    """
    return [name for name in registry.names("faults") if name != MUTATION]
