"""Put together what the ranks of a split model hold of one tensor, and find out how it is split.

A part is the whole (a replica), a slice of it along one dimension, or one term of a sum. Which rank
a part is of is its place in the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PartKind(StrEnum):
    """What each rank holds: a slice, all of it, or a term of the sum."""

    SHARDED = "sharded"
    REPLICATED = "replicated"
    PARTIAL = "partial"


@dataclass(frozen=True)
class RankShare:
    """Which part of a tensor one rank holds.

    Of slices, ``index`` says for each position along dimension ``dim`` where it stands in the
    whole; -1 is padding, which is left out.
    """

    kind: PartKind = PartKind.REPLICATED
    dim: int = 0
    index: tuple[int, ...] = ()


WHOLE = RankShare()
TERM = RankShare(PartKind.PARTIAL)


@dataclass(frozen=True)
class Split:
    """How a tensor lies on ranks: sharded along ``axis``, each slice on ``copies`` ranks.

    These stand in a row; ``tiled``, all slices follow each other, and then all of them again. Only
    of what is sharded do the three mean anything.
    """

    kind: PartKind
    axis: int = -1
    copies: int = 1
    tiled: bool = False

    def slices(self, ranks: int) -> list[int]:
        """Return which slice each of so many ranks holds."""
        count = -(-ranks // self.copies)
        return [rank % count if self.tiled else rank // self.copies for rank in range(ranks)]

    def shares(self, parts: Sequence[torch.Tensor]) -> list[RankShare]:
        """Return which part each rank's tensor is, of any shape: slices follow each other."""
        if self.kind is not PartKind.SHARDED:
            return [RankShare(self.kind)] * len(parts)
        held, shares = self.slices(len(parts)), list[RankShare]()
        # The last slice may be shorter: each begins where the one before it ends.
        start = 0
        for slice_ in range(max(held) + 1):
            end = start + parts[held.index(slice_)].shape[self.axis]
            shares.append(RankShare(self.kind, self.axis, tuple(range(start, end))))
            start = end
        return [shares[slice_] for slice_ in held]


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
    """Return the whole of the ranks' ``parts``, of any shape and of the first one's dtype.

    Of replicas the first rank's counts; terms are added up in float64. Raises ValueError for parts
    that do not make up a whole.
    """
    import torch

    first = shares[0]
    if any((each.kind, each.dim) != (first.kind, first.dim) for each in shares):
        raise ValueError("the ranks' parts are not of one kind")
    if first.kind is not PartKind.SHARDED and len({each.shape for each in parts}) > 1:
        what = "terms" if first.kind is PartKind.PARTIAL else "replicas"
        raise ValueError(f"{what} have the shapes {[list(each.shape) for each in parts]}")
    if first.kind is PartKind.PARTIAL:
        # Rounded once: in a narrow type, small terms vanish beside a large sum.
        return Merged(_total(parts).to(parts[0].dtype))
    if first.kind is PartKind.REPLICATED:
        # A copy: the whole is filled in place, and the first rank's own tensor must stay.
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


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of parts of one shape and any dtype, float64."""
    total = parts[0].double()
    for part in parts[1:]:
        total = total + part
    return total


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
        # Places that this rank filled just now are its own values, and equal themselves.
        before = whole.index_select(dim, places) if whole.dim() else whole
        relative = distance(part, before)
        worst = max(worst, relative)
        for each in owners:
            held_by = sides.setdefault((each, tuple(places.tolist())), [(before, [each])])
            # By `distance`, since NaN at the same places is no disagreement.
            alike = (ranks for values, ranks in held_by if distance(part, values) == 0.0)
            same = next(alike, None)
            held_by.append((part, [rank])) if same is None else same.append(rank)
    odd = {rank for each in sides.values() for rank in odd_ones([ranks for _, ranks in each])}
    return Merged(whole, worst, tuple(sorted(odd)))


def odd_ones(sides: Sequence[Sequence[int]]) -> set[int]:
    """Return the ranks that are not on the largest side; all of them where no side is larger."""
    if len(sides) == 1:
        return set()
    most = max(map(len, sides))
    believed = [each for each in sides if len(each) == most]
    return {rank for each in sides if len(believed) > 1 or each is not believed[0] for rank in each}


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors of one shape hold the same numbers, NaN at the same places."""
    import torch

    # To torch.equal no NaN equals another; what is infinite stays so, and equals no number.
    plain = (each.nan_to_num(0.0, math.inf, -math.inf) for each in (one, other))
    return torch.equal(*plain) and torch.equal(one.isnan(), other.isnan())


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return ``||one - other|| / ||other||``; 0 where both are equal, NaN at the same places.

    Any shape and dtype; infinite where they differ and one of them holds NaN or Inf, where
    ``other`` is zero, and where their shapes differ.
    """
    import torch

    if one.shape != other.shape:
        return math.inf
    if is_same(one, other):
        return 0.0
    wide = torch.float64
    apart = (one.to(wide) - other.to(wide)).norm().item()
    size = other.to(wide).norm().item()
    ratio = apart / size if size else math.inf
    return math.inf if math.isnan(ratio) else ratio


def apart(parts: Sequence[torch.Tensor], split: Split | None = None) -> dict[int, float]:
    """Return the ranks whose part is not to the bit what most ranks that should hold it have.

    Each with its distance from those, or from another one where no side has more. Parts are of any
    shape; without a ``split`` all ranks hold one.
    """
    held, found = split.slices(len(parts)) if split else [0] * len(parts), {}
    for slice_ in sorted(set(held)):
        sides: list[list[int]] = []
        for rank in (rank for rank, own in enumerate(held) if own == slice_):
            same = (side for side in sides if distance(parts[rank], parts[side[0]]) == 0.0)
            side = next(same, None)
            sides.append([rank]) if side is None else side.append(rank)
        for rank in odd_ones(sides):
            other = next(
                side[0] for side in sorted(sides, key=len, reverse=True) if rank not in side
            )
            found[rank] = distance(parts[rank], parts[other])
    return dict(sorted(found.items()))


def disagreeing(parts: Sequence[torch.Tensor], split: Split | None = None) -> dict[int, float]:
    """Return the ranks of `apart` whose part is another by more than one rounding of its type.

    Nobody promises that two ranks round alike, and terms of a sum are never so near.
    """
    import torch

    first = parts[0]
    step = torch.finfo(first.dtype).eps if first.is_floating_point() else 0.0
    return {rank: off for rank, off in apart(parts, split).items() if off > step}


def found_slices(parts: Sequence[torch.Tensor], whole: Sequence[int]) -> Split | None:
    """Return along which axis parts are slices of a tensor of a shape, and how often each is there.

    None where their sizes do not add up along any axis.
    """
    if any(part.dim() != len(whole) for part in parts):
        return None
    for axis in reversed(range(len(whole))):
        others = [[n for at, n in enumerate(part.shape) if at != axis] for part in parts]
        if any(each != [n for at, n in enumerate(whole) if at != axis] for each in others):
            continue
        total = sum(part.shape[axis] for part in parts)
        copies, over = divmod(total, whole[axis]) if whole[axis] else (0, 1)
        if copies and not over and len(parts) % copies == 0:
            return Split(PartKind.SHARDED, axis - len(whole), copies)
    return None


def sums_up(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Say whether parts of a whole tensor's shape sum nearer to it than any part is: are terms."""
    wide = whole.double()
    off = (_total(parts).to(parts[0].dtype).double() - wide).norm()
    return bool(off < min((part.double() - wide).norm() for part in parts))


def left_with(whole: torch.Tensor, first: int, end: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what there may be of a whole [n, ...] of which positions ``first`` to ``end`` came.

    Each with what the others are: 1, 0, or, where it fits evenly, that slice again and again.
    """
    import torch

    for filled in (1.0, 0.0):
        own = torch.full_like(whole, filled)
        own[first:end] = whole[first:end]
        yield f"{filled:g}", own
    times, over = divmod(len(whole), end - first)
    if not over:
        again = whole[first:end].repeat(times, *[1] * (whole.dim() - 1))
        yield "that slice again", again


def slice_alone(
    held: torch.Tensor, stored: torch.Tensor, slices: Iterable[tuple[int, int]]
) -> tuple[int, ...]:
    """Return the one of some slices (first, end) that alone came of a tensor [n, ...]; else ().

    It has to give what is ``held`` to the bit; what is ``stored`` whole has none.
    """
    import torch

    if not stored.dim() or held.shape != stored.shape or torch.equal(held, stored):
        return ()
    found = (
        (first, end)
        for first, end in slices
        if end > first and any(torch.equal(held, own) for _, own in left_with(stored, first, end))
    )
    return next(found, ())
