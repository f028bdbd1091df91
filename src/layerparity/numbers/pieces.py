"""Pieces: numbers of few bits and their scales, and the values that are made of them.

A value is (number - zero point) * scale. The product is made in float32, from a scale that was
made in float32, as the formats' own libraries make it. An adapter adds to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

# The format of weights that a header's own type of eight bits names.
FP8 = "F8_E4M3"
# The format of weights that an adapter adds to.
LORA = "LoRA"
# llama.cpp's types whose blocks have an offset besides their scale; those without one; and of both
# those that have two numbers of four bits in a byte.
WITH_OFFSETS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
IN_BLOCKS = (*WITH_OFFSETS, "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "Q3_K", "Q6_K")
IN_NIBBLES = ("Q4_0", "Q4_1", "IQ4_NL")
# What is taken off the unsigned numbers of some, to be signed.
CENTRES = {"Q4_0": 8, "Q5_0": 16}
# Where in a word of AWQ the numbers of eight outputs in a row stand, the lowest bits first.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Added(NamedTuple):
    """What an adapter adds to some rows: ``factor`` times a product, float64 [row, column].

    The product is of two matrices of that ``rank``.
    """

    product: torch.Tensor
    factor: float
    rank: int


class Pieces(NamedTuple):
    """What some rows of a weight are computed from, each float32.

    ``numbers`` [row, column] may be changed in place; ``scales`` and ``zeros`` [row or 1, group]
    serve ``width`` columns each, or those whose group ``order`` [column] says. ``height`` rows have
    the same scales; ``overall`` is the scale of the whole weight that is in them. ``offsets``
    [row, column] are added to the products. The two numbers of a byte are ``apart`` columns.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    width: int
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    height: int = 1
    overall: float = 1.0
    added: Added | None = None
    offsets: torch.Tensor | None = None
    apart: int = 1

    def wide(self, by_group: torch.Tensor) -> torch.Tensor:
        """Return ``scales`` or ``zeros`` [row or 1, group] by column: [row or 1, column]."""
        if self.order is not None:
            return by_group[:, self.order.long()]
        return by_group.repeat_interleave(self.width, 1)[:, : self.numbers.shape[1]]

    def values(self) -> torch.Tensor:
        """Return the values, float32 [row, column]; ``numbers`` are used up."""
        if self.added is not None:
            base = self._replace(added=None).values()
            return base.add_((self.added.product * self.added.factor).float())
        if self.offsets is not None:
            return self._replace(offsets=None).values().add_(self.offsets)
        rows, columns = self.numbers.shape
        if self.order is None and columns == self.scales.shape[1] * self.width:
            # Without a table of every number's scale, which takes as long as the rest.
            grouped = self.numbers.view(rows, -1, self.width)
            if self.zeros is not None:
                grouped.sub_(self.zeros[..., None])
            return grouped.mul_(self.scales[..., None]).view(rows, columns)
        if self.zeros is not None:
            self.numbers.sub_(self.wide(self.zeros))
        return self.numbers.mul_(self.wide(self.scales))

    def exact(self) -> torch.Tensor:
        """Return the values without a rounding, float64 [row, column]."""
        numbers = self.numbers.double()
        if self.zeros is not None:
            numbers = numbers - self.wide(self.zeros)
        exact = numbers * self.wide(self.scales).double()
        if self.offsets is not None:
            exact = exact + self.offsets
        return exact if self.added is None else exact + self.added.product * self.added.factor
