"""Number of elements that are not the same to the bit: the metric of exact sites and masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerparity.anatomy.site import Kind
from layerparity.numbers.metric import Chunk

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Unequal:
    """Count of elements whose bits differ, once the golden is in the candidate's dtype.

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
        kind = _BITS[candidate.element_size()]
        return state + int(torch.count_nonzero(golden.view(kind) != candidate.view(kind)))

    def compute(self, state: int) -> float:
        """Return the count."""
        return float(state)


METRIC = Unequal()
