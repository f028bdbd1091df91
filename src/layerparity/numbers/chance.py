"""Chance: by how much a squared floor, seen in few tokens or few numbers, is off by itself."""

from __future__ import annotations

from typing import TypeVar

import torch

# So few independent numbers, such as a router's two weights of a token, are off by chance.
FEW_NUMBERS = 8
# A few tokens are less than one of so many.
_FEW_OF = 4

TokenCount = TypeVar("TokenCount", float, torch.Tensor)


def of_few(tokens: TokenCount) -> TokenCount:
    """Return what to multiply a squared floor by, as it was seen in so many tokens only.

    All numbers of one token share factors (a norm, a softmax), which round well or badly together:
    of one token, the floor itself is off by a factor.
    """
    return (1 + 1 / tokens) ** 2


def as_many_alike(floors: torch.Tensor, errors: torch.Tensor | None = None) -> torch.Tensor:
    """Return how many tokens the noise of a site is of; ``floors`` are float64 [..., token].

    That is all of them, unless one token's outweighs all others' together, or a few have most of
    it and one of a candidate's squared ``errors``, of that shape, outweighs all others: then the
    whole is known as well as (sum f)^2 / sum f^2 tokens that are alike (Satterthwaite 1946).
    """
    whole, squares = floors.sum(-1), floors.square().sum(-1)
    alone = 2 * floors.amax(-1) > whole
    if errors is not None:
        # That is (sum f)^2 / sum f^2 < n / 4: a few tokens have most of the noise.
        few = _FEW_OF * whole.square() < squares * floors.shape[-1]
        alone = alone | (few & (2 * errors.amax(-1) > errors.sum(-1)))
    # Squares of the smallest floors underflow to zero, and tell no number of tokens.
    alone = alone & (squares > 0)
    alike = whole.square() / squares.clamp_min(1e-300)
    return torch.where(alone, alike, float(floors.shape[-1]))


def by_chance(tokens: TokenCount, width: int) -> TokenCount:
    """Return what to multiply a squared floor by that so many tokens of so many numbers showed."""
    return of_few(tokens) * (1 + FEW_NUMBERS / (tokens * width))
