"""Chance: by how much a squared floor, seen in few tokens or few numbers, is off by itself."""

from __future__ import annotations

from typing import TypeVar

import torch

# So few independent numbers, such as a router's two weights of a token, are off by chance.
FEW_NUMBERS = 8

TokenCount = TypeVar("TokenCount", float, torch.Tensor)


def of_few(tokens: TokenCount) -> TokenCount:
    """Return what to multiply a squared floor by, as it was seen in so many tokens only.

    All numbers of one token share factors (a norm, a softmax), which round well or badly together:
    of one token, the floor itself is off by a factor.
    """
    return (1 + 1 / tokens) ** 2


def by_chance(tokens: float, width: int) -> float:
    """Return what to multiply a squared floor by that so many tokens of so many numbers showed."""
    return of_few(tokens) * (1 + FEW_NUMBERS / (tokens * width))
