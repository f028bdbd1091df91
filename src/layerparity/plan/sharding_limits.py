"""Find what tensor parallelism cannot divide, and weights that the Neuron compiler refuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd

from layerparity.anatomy.sizes import ModelSizes
from layerparity.plan.weights import StageWeight, ranges

# neuronx-cc refuses a single tensor of more than 4 GB. Where it draws the line between 4 * 10^9 and
# 2^32 is not said, so the smaller is taken.
LIMIT = 4 * 10**9


def common_divisors(*numbers: int) -> list[int]:
    """Return every number that divides all of them, ascending."""
    largest = reduce(gcd, numbers)
    return [each for each in range(1, largest + 1) if largest % each == 0]


@dataclass(frozen=True)
class Divided:
    """One size of an architecture, and the degrees that divide it."""

    what: str
    size: int

    @property
    def divisors(self) -> list[int]:
        """Every number that divides it, ascending."""
        return common_divisors(self.size)


def divided(sizes: ModelSizes) -> list[Divided]:
    """Return what tensor parallelism divides; experts, which expert parallelism does, come last."""
    rows = [Divided(what, size) for what, size in sizes.divided.items()]
    return [*rows, Divided("experts", sizes.experts)] if sizes.experts else rows


def degrees(sizes: ModelSizes) -> list[int]:
    """Return every tp_degree that divides heads, KV heads and intermediate sizes, ascending."""
    return common_divisors(*sizes.divided.values())


@dataclass(frozen=True)
class TooLarge:
    """A weight above the limit: where it is, its shape and bytes, the smallest degree that helps.

    ``degree`` is None where no degree that divides the architecture is enough.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    degree: int | None


def too_large(weights: Iterable[StageWeight], dtype: str, degrees: Sequence[int]) -> list[TooLarge]:
    """Return every weight above the limit, equal ones of several blocks as one.

    ``degrees`` are those that divide the architecture, ascending.
    """
    alike: dict[tuple[str, tuple[int, ...], int], list[str]] = {}
    for weight in weights:
        size = weight.bytes(dtype)
        if size > LIMIT:
            # ``layers.3.mlp.x`` after the block, any other name after its first word.
            words = weight.name.split(".")
            count = 2 if words[0] == "layers" else 1
            stage, inside = ".".join(words[:count]), ".".join(words[count:])
            alike.setdefault((inside, weight.shape, size), []).append(stage)
    return [
        TooLarge(f"{ranges(stages)}.{inside}", shape, size, smallest(size, degrees))
        for (inside, shape, size), stages in alike.items()
    ]


def smallest(size: int, degrees: Sequence[int]) -> int | None:
    """Return the smallest of some degrees that brings a tensor's shards under the limit."""
    return next((each for each in degrees if size <= LIMIT * each), None)
