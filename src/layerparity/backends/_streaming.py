"""Streaming: whether a model's stages, one after the other, fit the memory there is."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from layerparity.console import bytes_text
from layerparity.errors import UserError

STREAM = "stream"


def reads_ahead(sizes: Mapping[str, int], free: int, where: str = "memory") -> bool:
    """Say whether the next stage can be read while one computes.

    ``sizes`` are bytes by stage in running order, ``free`` what may be taken. Raises UserError,
    saying how much is needed, where one stage alone does not fit.
    """
    largest = max(sizes, key=lambda stage: sizes[stage])
    if sizes[largest] > free:
        raise UserError(
            f"{largest} alone needs {bytes_text(sizes[largest])} for its weights, and {where} has "
            f"{bytes_text(free)} left: raise the limit (max_memory=, ulimit, container) to at "
            "least that, or leave that stage out with scope=."
        )
    return most_at_once(sizes) <= free


def most_at_once(sizes: Mapping[str, int]) -> int:
    """Return the bytes of the two neighbouring stages that are largest together."""
    alone = max(sizes.values())
    return max((left + right for left, right in pairwise(sizes.values())), default=alone)


def told(sizes: Mapping[str, int], ahead: bool) -> str:
    """Return how the stages stream, for the user."""
    total = bytes_text(sum(sizes.values()))
    if ahead:
        held = f"at most two in memory, {bytes_text(most_at_once(sizes))}; the next is read ahead"
    else:
        held = f"one in memory, at most {bytes_text(max(sizes.values()))}; nothing is read ahead"
    return f"streaming {len(sizes)} stages ({total}): {held}."
