"""What every tolerance offers. Its file holds ``Settings``, whose values come from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from layerparity.anatomy.site import Kind
from layerparity.numbers.closeness import Closeness
from layerparity.record.verdict import Breach


class Tolerance(Protocol):
    """Limits on metrics. Never given a site that is judged by equality."""

    name: str

    @property
    def knows_rounding(self) -> bool:
        """Whether it knows how far rounding goes; one that does not may fail a right 16-bit run."""

    @property
    def knows_chains(self) -> bool:
        """Whether it knows what clean chains become; a right chain exceeds one that does not."""

    @property
    def closeness(self) -> Closeness:
        """Which elements are similar, for the metric that counts them."""

    def limits(self) -> dict[str, float]:
        """Return the limits by name, for the record."""

    def lacks(self, kind: Kind, metrics: Mapping[str, float]) -> bool:
        """Return whether the metrics hold nothing that this tolerance could judge by."""

    def breaches(self, kind: Kind, metrics: Mapping[str, float]) -> list[Breach]:
        """Return the broken limits; nothing where all hold."""
