"""Put together what the ranks of a split model hold of one tensor, and find out how it is split.

Pure functions on tensors: which rank they are of is their place in the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
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
class Split:
    """How a tensor lies on ranks: sharded along ``axis``, each slice on ``copies`` ranks in a row.

    Only of what is sharded do axis and copies mean anything.
    """

    kind: PartKind
    axis: int = -1
    copies: int = 1


def merge(
    parts: Sequence[torch.Tensor], kind: PartKind, axis: int = -1, copies: int = 1
) -> torch.Tensor:
    """Return the whole tensor, of the parts' dtype.

    ``parts`` are of any shape and dtype, alike but for the size along ``axis``, in the order of the
    ranks. Of replicas the first rank's counts; terms are added up in float64.
    """
    import torch

    if kind is PartKind.REPLICATED:
        return parts[0]
    if kind is PartKind.SHARDED:
        return torch.cat(list(parts[::copies]), dim=axis)
    total = torch.zeros(parts[0].shape, dtype=torch.float64)
    for part in parts:
        total += part
    return total.to(parts[0].dtype)


def apart(parts: Sequence[torch.Tensor], copies: int = 0) -> dict[int, float]:
    """Return the ranks whose part is not to the bit that of the rank they are a replica of.

    Each with its relative L2 distance; ``copies`` ranks in a row hold one part, 0: all do.
    """
    import torch

    step = copies or len(parts)
    found = {}
    for rank, part in enumerate(parts):
        first = parts[rank - rank % step]
        if part.shape != first.shape or not torch.equal(part, first):
            found[rank] = _distance(part, first)
    return found


def found_kind(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> Split | None:
    """Return how the parts make up a whole tensor that is about theirs; None where they do not.

    Sizes that add up along one axis are slices, on several ranks each where they add up to a
    multiple. Of parts of the whole's own shape, equal ones are replicas; unequal ones are terms
    where their sum is nearer to the whole than any of them is.
    """
    import torch

    if all(part.shape == whole.shape for part in parts):
        if len(parts) == 1 or all(torch.equal(part, parts[0]) for part in parts):
            return Split(PartKind.REPLICATED)
        return Split(PartKind.PARTIAL if sums_up(parts, whole) else PartKind.REPLICATED)
    return found_slices(parts, tuple(whole.shape))


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
    """Say whether the sum of parts is nearer to a whole tensor than any part: they are terms."""
    total = merge(parts, PartKind.PARTIAL)
    return _distance(total, whole) < min(_distance(part, whole) for part in parts)


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the relative L2 distance of two tensors; inf where their shapes differ."""
    if left.shape != right.shape:
        return float("inf")
    norm = float(right.double().norm())
    return float((left.double() - right.double()).norm()) / (norm or 1.0)
