"""Conversions: which weights a run holds in another type than the checkpoint, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from layerparity.manifest import WeightPrint

# Names that a line of the terminal can bear.
_NAMED = 2


def line(effective: Mapping[str, Mapping[str, WeightPrint]]) -> str:
    """Return how many weights have their stored type, which were converted, and who was rounded.

    ``effective`` are prints by stage and stored name, held against the checkpoint. Empty where the
    port reported none.
    """
    prints = {name: each for held in effective.values() for name, each in held.items()}
    if not prints:
        return ""
    converted = Counter(
        (each.stored, each.dtype)
        for each in prints.values()
        if each.stored and each.stored != each.dtype
    )
    parts = [f"{count:,} {stored} held as {held}" for (stored, held), count in converted.items()]
    same = len(prints) - converted.total()
    said = [f"weights: {same:,} of {len(prints):,} in their stored type", *parts]
    return ", ".join(said) + _rounded_text(rounded(prints))


def rounded(prints: Mapping[str, WeightPrint]) -> list[str]:
    """Return the stored names of weights that lost precision."""
    return [name for name, each in prints.items() if each.checkpoint == "rounded"]


def _rounded_text(names: Iterable[str]) -> str:
    first = sorted(names)
    if not first:
        return ""
    more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    return f"; rounded: {', '.join(first[:_NAMED])}{more}"
