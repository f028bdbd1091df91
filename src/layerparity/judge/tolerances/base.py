"""What every tolerance offers. Its file holds ``Settings``, whose values come from YAML."""

from __future__ import annotations

from typing import Protocol

from layerparity.anatomy.site import Kind


class Tolerance(Protocol):
    """Limits on metrics. Never given a site that is judged by equality."""

    name: str

    def limits(self) -> dict[str, float]:
        """Return the limits by name, for the record."""

    def lacks(self, kind: Kind, metrics: dict[str, float]) -> bool:
        """Return whether the metrics hold nothing that this tolerance could judge by."""

    def broken(self, kind: Kind, metrics: dict[str, float]) -> list[str]:
        """Return for each broken limit which it is and by how much; nothing where all hold."""
