"""What numbers are computed in, by which a noise floor is found.

A floor is of a floating type, or of one whose products round their operands: ``float32``, and
``float32*float16+q8_0``.
"""

from __future__ import annotations

from typing import NamedTuple

_BY, _AND = "*", "+"


class Computed(NamedTuple):
    """A floating type by torch's name, and what its products round their operands to."""

    dtype: str
    operands: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}{_BY}{_AND.join(self.operands)}" if self.operands else self.dtype

    @classmethod
    def parse(cls, text: str) -> Computed:
        """Return what a floor's name says."""
        dtype, _, operands = text.partition(_BY)
        return cls(dtype, tuple(operands.split(_AND)) if operands else ())
