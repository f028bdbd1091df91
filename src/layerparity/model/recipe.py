"""Describe how a module's weight is made of stored tensors, as places to copy them to.

transformers describes it as operations on whole tensors: stack the experts, concatenate gate and
up. Done so, each step holds everything twice. Here the operations only say which part of the
finished weight each stored tensor fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SourceView:
    """One stored tensor, and the view of the finished weight that it fills.

    ``steps`` are the tensor methods that lead from the weight to the view, with their arguments.
    """

    name: str
    steps: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def view(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the part of ``weight`` that this tensor fills, in the stored shape, uncopied."""
        for method, arguments in self.steps:
            weight = getattr(weight, method)(*arguments)
        return weight

    def inside(self, method: str, *arguments: int) -> SourceView:
        """Return the view where what was the weight is itself a view of a larger one."""
        return replace(self, steps=((method, arguments), *self.steps))


@dataclass(frozen=True)
class Recipe:
    """How a tensor is laid together: its shape, and what each stored tensor fills of it."""

    shape: Shape
    sources: tuple[SourceView, ...]

    def inside(self, method: str, *arguments: int) -> list[SourceView]:
        """Return its sources where this tensor is a view of a larger one."""
        return [source.inside(method, *arguments) for source in self.sources]


@dataclass(frozen=True)
class WantedWeight:
    """A module weight that is wanted: how it is made, and the type it is held in."""

    recipe: Recipe
    dtype: torch.dtype


class NoRecipeError(Exception):
    """The operations do more than lay tensors beside each other."""


def whole(name: str, shape: Shape) -> Recipe:
    """Return the recipe of a stored tensor as it is."""
    return Recipe(shape, (SourceView(name),))


def lay(operations: Sequence[Any], parts: Mapping[str, list[Recipe]]) -> Recipe:
    """Return what transformers' ``operations`` make of the parts of each source pattern.

    Raises NoRecipeError where an operation is not known here, or the shapes do not fit together.
    """
    state = dict(parts)
    for operation in operations:
        known = _KNOWN.get(type(operation).__name__)
        if known is None or getattr(operation, "check_dims", False):
            raise NoRecipeError
        state = known(operation, state)
    left = [part for parts_ in state.values() for part in parts_]
    if len(left) != 1:
        raise NoRecipeError
    return left[0]


def _stack(operation: Any, state: dict[str, list[Recipe]]) -> dict[str, list[Recipe]]:
    """Stack the parts of each pattern along a new axis."""
    dim, stacks = operation.dim, {}
    for pattern, parts in state.items():
        if len({part.shape for part in parts}) != 1:
            raise NoRecipeError
        shape = list(parts[0].shape)
        shape.insert(dim, len(parts))
        sources = [each for n, part in enumerate(parts) for each in part.inside("select", dim, n)]
        stacks[pattern] = [Recipe(tuple(shape), tuple(sources))]
    return stacks


def _concatenate(operation: Any, state: dict[str, list[Recipe]]) -> dict[str, list[Recipe]]:
    """Join all parts along an axis that they have."""
    parts = [part for each in state.values() for part in each]
    dim = operation.dim % len(parts[0].shape)
    others = {part.shape[:dim] + part.shape[dim + 1 :] for part in parts}
    if len(others) != 1:
        raise NoRecipeError
    sources, start = [], 0
    for part in parts:
        sources += part.inside("narrow", dim, start, part.shape[dim])
        start += part.shape[dim]
    shape = (*parts[0].shape[:dim], start, *parts[0].shape[dim + 1 :])
    return {next(iter(state)): [Recipe(shape, tuple(sources))]}


def _transpose(operation: Any, state: dict[str, list[Recipe]]) -> dict[str, list[Recipe]]:
    """Swap two axes of the one part there is."""
    parts = [part for each in state.values() for part in each]
    if len(parts) != 1:
        raise NoRecipeError
    first, second = operation.dim0, operation.dim1
    shape = list(parts[0].shape)
    shape[first], shape[second] = shape[second], shape[first]
    sources = parts[0].inside("transpose", first, second)
    return {next(iter(state)): [Recipe(tuple(shape), tuple(sources))]}


_KNOWN = {"MergeModulelist": _stack, "Concatenate": _concatenate, "Transpose": _transpose}
