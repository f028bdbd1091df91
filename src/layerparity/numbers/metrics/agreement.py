"""How many elements agree, and by how many steps the worst one does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerparity.anatomy.site import Kind
from layerparity.numbers.metric import Additive, Chunk, Largest

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def percentage(similar: float, size: float) -> float:
    """Return 100 x similar / all elements, where similar is |d| <= atol + rtol |c|, as in isclose.

    ``torch.isclose(golden, candidate)`` holds a difference against its second tensor. See
    `layerparity.numbers.closeness`. An element that is not finite is similar to none; NaN of none.
    """
    return 100.0 * similar / size if size else float("nan")


def itself(count: float) -> float:
    """Return a count as it is."""
    return count


@dataclass(frozen=True)
class Unequal:
    """Count of elements whose bits differ, once both are in the narrower of the two dtypes.

    The cast is what feeding a wider golden's values to a narrower run does; it is no difference.
    """

    kinds: tuple[Kind, ...] = (Kind.EXACT, Kind.MASK)

    def start(self) -> int:
        """Return 0."""
        return 0

    def update(self, state: int, chunk: Chunk) -> int:
        """Add the chunk's unequal elements."""
        # In the narrower of the two: the wider may hold digits that the other never had.
        narrower = min((chunk.candidate, chunk.golden), key=lambda side: side.element_size()).dtype
        candidate = chunk.candidate.reshape(-1).to(narrower)
        golden = chunk.golden.reshape(-1).to(narrower)
        # As bits, where NaN is equal to itself and -0 is not 0.
        kind = _BITS[candidate.element_size()]
        return state + int(torch.count_nonzero(golden.view(kind) != candidate.view(kind)))

    def compute(self, state: int) -> float:
        """Return the count."""
        return float(state)


METRICS = {
    # Elements whose class (finite, NaN, +Inf, -Inf) is not the same on both sides.
    "nonfinite_disagreement": Additive(("nonfinite_disagreement",), itself),
    "similarity_percentage": Additive(("similar", "size"), percentage),
    # The most steps of the candidate's dtype from golden, rounded to it, to candidate; +0 and -0
    # are one. Between values of opposite sign near zero the steps are many and mean little.
    "ulp_distance": Largest("max_ulp"),
    "unequal": Unequal(),
}
