"""Groups: the ways in which the numbers of one token fall together: whole, by head, by channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

WHOLE, HEAD, CHANNEL = "whole", "head", "channel"


@dataclass(frozen=True)
class Layout:
    """How a site's tensor [batch, token, ...] is laid out: elements of a token, heads among them.

    ``heads`` is 0 where the elements are no heads.
    """

    elements: int
    heads: int

    @property
    def groupings(self) -> tuple[str, ...]:
        """The groupings that mean something here."""
        return (WHOLE, HEAD, CHANNEL) if self.heads > 1 else (WHOLE, CHANNEL)

    def size(self, grouping: str) -> int:
        """Return the number of groups of a grouping."""
        return {WHOLE: 1, HEAD: self.heads, CHANNEL: self.elements}[grouping]

    def sums(self, values: torch.Tensor, grouping: str) -> torch.Tensor:
        """Return the sums over each group of [..., elements] as [..., groups]."""
        if grouping == CHANNEL:
            return values
        if grouping == WHOLE:
            return values.sum(-1, keepdim=True)
        return values.unflatten(-1, (self.heads, -1)).sum(-1)


def heads_of(sites: Iterable[tuple[str, tuple[int, ...], tuple[str, ...]]]) -> dict[str, int]:
    """Count the heads of ``q``, ``k`` and ``v``, as far as rotated queries and keys show them.

    ``sites`` are (end, shape, axes) of a block's sites.
    """
    counts = {
        end[0]: shape[axes.index("head")]
        for end, shape, axes in sites
        if end in ("q_rotated", "k_rotated") and "head" in axes
    }
    return counts | ({"v": counts["k"]} if "k" in counts else {})


def layout(
    shape: tuple[int, ...], axes: tuple[str, ...], local: str, heads: dict[str, int]
) -> Layout:
    """Return the layout of a site; ``heads`` counts the heads of ``q``, ``k`` and ``v``."""
    elements = 1
    for size, axis in zip(shape, axes, strict=True):
        elements *= 1 if axis in ("batch", "token") else size
    if "head" in axes:
        return Layout(elements, shape[axes.index("head")])
    count = next((n for part, n in heads.items() if local.startswith(f"self_attn.{part}_")), 0)
    return Layout(elements, count if count and elements % count == 0 else 0)
