"""Put the parts that ranks hold of one tensor together, and tell replicas that disagree.

A part is the whole (a replica), a share of it along one dimension, or one term of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Spread(StrEnum):
    """How ranks hold a tensor: each all of it, each a share of it, or each a term of its sum."""

    WHOLE = "whole"
    SPLIT = "split"
    SUM = "sum"


@dataclass(frozen=True)
class RankShare:
    """Which part of a tensor one rank holds.

    Of a split tensor, ``index`` says for each position along dimension ``dim`` where it stands in
    the whole; -1 is padding, which is left out.
    """

    spread: Spread = Spread.WHOLE
    dim: int = 0
    index: tuple[int, ...] = ()


WHOLE = RankShare()
SUM = RankShare(Spread.SUM)


@dataclass(frozen=True)
class Merged:
    """A whole tensor, and what its replicas say to each other.

    ``relative`` is the largest distance of two replicas over the norm of the first, 0 where all
    are equal to the bit; ``ranks`` are those that disagree with most others, all that disagree
    where no side has more.
    """

    tensor: torch.Tensor
    relative: float = 0.0
    ranks: tuple[int, ...] = ()


def merge(parts: Sequence[torch.Tensor], shares: Sequence[RankShare]) -> Merged:
    """Return the whole of the ranks' ``parts``, in the order of ranks; of any shape and dtype.

    A sum is added up in float32 (float64 for float64) in the order of ranks. Raises ValueError for
    parts that do not make up a whole.
    """
    import torch

    first = shares[0]
    if any((each.spread, each.dim) != (first.spread, first.dim) for each in shares):
        raise ValueError("the ranks' parts are not of one kind")
    if first.spread is Spread.SUM:
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        total = torch.stack([each.to(wide) for each in parts]).sum(0)
        return Merged(total.to(parts[0].dtype))
    if first.spread is Spread.WHOLE:
        if len({each.shape for each in parts}) > 1:
            raise ValueError(f"replicas have the shapes {[list(each.shape) for each in parts]}")
        return _agreed(parts[0].clone(), [(rank, each, None) for rank, each in enumerate(parts)], 0)
    size = 1 + max(max(each.index, default=-1) for each in shares)
    missing = set(range(size)) - {place for each in shares for place in each.index}
    if missing:
        raise ValueError(f"no rank holds position {min(missing)} of {size}")
    held = []
    for rank, (part, share) in enumerate(zip(parts, shares, strict=True)):
        index = torch.tensor(share.index, dtype=torch.int64)
        real = (index >= 0).nonzero().flatten()
        held.append((rank, part.index_select(first.dim, real), index[real]))
    shape = list(parts[0].shape)
    shape[first.dim] = size
    return _agreed(parts[0].new_zeros(shape), held, first.dim)


def _agreed(
    whole: torch.Tensor,
    held: Sequence[tuple[int, torch.Tensor, torch.Tensor | None]],
    dim: int,
) -> Merged:
    """Fill ``whole`` from what ranks hold, the first one first, and compare what comes later."""
    import torch

    owner = torch.full((whole.shape[dim] if whole.dim() else 1,), -1)
    everything = torch.arange(len(owner))
    # Of each owner and what others hold of its positions: the values there are, and whose.
    sides: dict[tuple[int, tuple[int, ...]], list[tuple[torch.Tensor, list[int]]]] = {}
    worst = 0.0
    for rank, part, index in held:
        places = everything if index is None else index
        fresh = owner[places] < 0
        if whole.dim() and bool(fresh.any()):
            whole.index_copy_(dim, places[fresh], part.index_select(dim, fresh.nonzero().flatten()))
        owners = sorted(set(owner[places[~fresh]].tolist()))
        owner[places[fresh]] = rank
        if not owners:
            continue
        before = whole.index_select(dim, places) if whole.dim() else whole
        relative = distance(part, before)
        worst = max(worst, relative)
        for each in owners:
            held_by = sides.setdefault((each, tuple(places.tolist())), [(before, [each])])
            alike = (ranks for values, ranks in held_by if distance(part, values) == 0.0)
            same = next(alike, None)
            held_by.append((part, [rank])) if same is None else same.append(rank)
    odd = {rank for each in sides.values() for rank in odd_ones([ranks for _, ranks in each])}
    return Merged(whole, worst, tuple(sorted(odd)))


def odd_ones(sides: Sequence[Sequence[int]]) -> set[int]:
    """Return the ranks that are not on the largest side; all of them where no side is larger."""
    most = max(map(len, sides))
    believed = [each for each in sides if len(each) == most]
    if len(sides) == 1:
        return set()
    return {rank for each in sides if len(believed) > 1 or each is not believed[0] for rank in each}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return ``||one - other|| / ||other||``; 0 where both are equal, NaN at the same places.

    Any shape and dtype; infinite where only one of them is finite, or ``other`` is zero.
    """
    import torch

    if torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) and torch.equal(
        one.isnan(), other.isnan()
    ):
        return 0.0
    wide = torch.float64
    apart = (one.to(wide) - other.to(wide)).norm().item()
    size = other.to(wide).norm().item()
    ratio = apart / size if size else math.inf
    return math.inf if math.isnan(ratio) else ratio
