"""Mechanism: what a model does only from some length of a text on, such as a window."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mechanism:
    """What a model does from a length on: a text of ``tokens`` is the shortest that exercises it.

    ``layers`` are the blocks that do it, none where all do.
    """

    name: str
    tokens: int
    layers: tuple[int, ...] = ()
