"""PortLoads: what the port of a run really imported and read, and what each of it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass
class PortLoads:
    """What a port of one's own loaded.

    ``modules`` are files by the module's name. ``files`` are hashes by path, as it was opened; of a
    large one its size and times. ``libraries`` are installed distributions by name, ``variables``
    hashes of the values that were read, never the values.
    """

    modules: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    def update(self, other: PortLoads, without: Mapping[str, str] | None = None) -> None:
        """Add what another process loaded, but the variables ``without``, which are its own."""
        for each in fields(self):
            added = getattr(other, each.name)
            getattr(self, each.name).update(
                {name: what for name, what in added.items() if name not in (without or {})}
            )

    def __str__(self) -> str:
        """Return how many there are of each: ``modules 3, files 4, libraries 40, variables 1``."""
        return ", ".join(f"{each.name} {len(getattr(self, each.name))}" for each in fields(self))
