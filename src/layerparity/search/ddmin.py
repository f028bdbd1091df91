"""Delta debugging: the fewest keys that are needed to fail.

The algorithm is ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input"
(IEEE TSE 28(2), 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

K = TypeVar("K")
Reduced = tuple[list[K], int]


class NoDifferenceError(ValueError):
    """The keys make no difference: it fails with all and with none of them, or with neither."""

    def __init__(self, fails: bool) -> None:
        super().__init__(
            "it fails without any of the keys" if fails else "it does not fail with all of the keys"
        )
        self.fails = fails


def minimal(keys: Sequence[K], fails: Callable[[frozenset[K]], bool]) -> tuple[K, ...]:
    """Return keys of which every one is needed to fail, in the order given.

    ``fails`` is asked once for each set. Raises NoDifferenceError unless the whole set fails and
    the empty one does not. The result is 1-minimal: without any of its keys it no longer fails,
    though a smaller set elsewhere may. O(n^2) trials at worst, O(log n) where one key is to blame.
    """
    tried: dict[frozenset[K], bool] = {}

    def test(subset: Sequence[K]) -> bool:
        asked = frozenset(subset)
        if asked not in tried:
            tried[asked] = fails(asked)
        return tried[asked]

    if test(()):
        raise NoDifferenceError(fails=True)
    if not test(keys):
        raise NoDifferenceError(fails=False)
    kept, pieces = list(keys), 2
    while len(kept) >= 2:
        reduced = _reduced(_split(kept, pieces), test)
        if reduced is not None:
            kept, pieces = reduced
        elif pieces < len(kept):
            pieces = min(len(kept), 2 * pieces)
        else:
            break
    return tuple(kept)


def _reduced(parts: list[list[K]], test: Callable[[Sequence[K]], bool]) -> Reduced[K] | None:
    """Return fewer keys that fail, and into how many parts to cut them next; None if none do.

    They are a part alone, to be cut in two, or all but a part, with its parts as fine as before.
    """
    for part in parts:
        if test(part):
            return part, 2
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
