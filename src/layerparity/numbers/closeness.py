"""Closeness: which elements of two tensors are similar. Torch is not needed to know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Closeness:
    """What makes two elements similar: ``|golden - candidate| <= atol + rtol * |candidate|``.

    That is ``torch.isclose(golden, candidate, rtol, atol)``, and the constants are those of the
    script that the table of fixed limits comes from.
    """

    rtol: float = 1e-3
    atol: float = 1e-3


CLOSE = Closeness()
