"""scan: one run of all blocks, each fed from the golden; the first that is locally wrong."""

from __future__ import annotations

from layerparity.search.strategies.base import Bench, Found, read


class Scan:
    """One run and one comparison; wants a golden with every block's input."""

    name = "scan"

    def find(self, bench: Bench) -> Found:
        """Return the first place, in forward order, whose input is good and whose sites fail."""
        return read(bench.isolated(), "every block alone, fed from the golden")


STRATEGY = Scan()
