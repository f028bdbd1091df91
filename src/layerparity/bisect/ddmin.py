"""Delta debugging: the smallest set of keys that makes a configuration fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

K = TypeVar("K")


def minimal(keys: Sequence[K], fails: Callable[[frozenset[K]], bool]) -> tuple[K, ...]:
    """Return keys of which every one is needed to fail, in the order given.

    ``fails`` is asked once for each set. The whole set must fail and the empty one must not: raises
    ValueError. The result is 1-minimal: without any one of its keys it no longer fails, though a
    smaller set elsewhere may. O(n^2) trials at worst, O(log n) where one key is to blame.
    The algorithm is ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing
    Input" (IEEE TSE 28(2), 2002).
    """
    tried: dict[frozenset[K], bool] = {}

    def test(subset: Sequence[K]) -> bool:
        asked = frozenset(subset)
        if asked not in tried:
            tried[asked] = fails(asked)
        return tried[asked]

    if test(()):
        raise ValueError("it fails without any of the keys")
    if not test(keys):
        raise ValueError("it does not fail with all of the keys")
    kept, pieces = list(keys), 2
    while len(kept) >= 2:
        parts = _split(kept, pieces)
        reduced = _one_part(parts, test) or _all_but_one(parts, test)
        if reduced is None:
            if pieces >= len(kept):
                break
            pieces = min(len(kept), 2 * pieces)
            continue
        kept, pieces = reduced
    return tuple(kept)


Reduced = tuple[list[K], int]


def _one_part(parts: list[list[K]], test: Callable[[Sequence[K]], bool]) -> Reduced[K] | None:
    """Return the first part that fails alone, to be cut in two next."""
    return next(((part, 2) for part in parts if test(part)), None)


def _all_but_one(parts: list[list[K]], test: Callable[[Sequence[K]], bool]) -> Reduced[K] | None:
    """Return the first complement of a part that fails, its parts as fine as before."""
    for index in range(len(parts)):
        rest = [key for other, part in enumerate(parts) if other != index for key in part]
        if test(rest):
            return rest, max(len(parts) - 1, 2)
    return None


def _split(keys: list[K], pieces: int) -> list[list[K]]:
    """Return keys cut into ``pieces`` parts whose sizes differ by one at most."""
    size, longer = divmod(len(keys), pieces)
    parts, start = [], 0
    for index in range(pieces):
        end = start + size + (index < longer)
        parts.append(keys[start:end])
        start = end
    return [part for part in parts if part]
