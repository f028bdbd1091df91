"""Recipe: how a module's weight is laid together from stored tensors, as places to copy them to.

transformers describes it as operations on whole tensors: stack the experts, concatenate gate and
up. Done so, each step holds everything twice. Here the operations only say which part of the
finished weight each stored tensor fills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
View = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Piece:
    """One stored tensor, and the view of the finished weight that it fills."""

    name: str
    view: View


@dataclass(frozen=True)
class Part:
    """A tensor that is being laid together: its shape, and the pieces it is made of."""

    shape: Shape
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Due:
    """A module weight that is wanted: what it is made of, and the type it is held in."""

    part: Part
    dtype: torch.dtype


class NoRecipeError(Exception):
    """The operations do more than lay tensors beside each other."""


def whole(name: str, shape: Shape) -> Part:
    """Return a stored tensor as it is."""
    return Part(shape, (Piece(name, _same),))


def lay(operations: Sequence[Any], parts: Mapping[str, list[Part]]) -> Part:
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


def _stacked(operation: Any, state: dict[str, list[Part]]) -> dict[str, list[Part]]:
    return {pattern: [_stack(parts, operation.dim)] for pattern, parts in state.items()}


def _stack(parts: list[Part], dim: int) -> Part:
    if len({part.shape for part in parts}) != 1:
        raise NoRecipeError
    shape = list(parts[0].shape)
    shape.insert(dim, len(parts))
    pieces = (
        Piece(piece.name, _after(_selected(dim, index), piece.view))
        for index, part in enumerate(parts)
        for piece in part.pieces
    )
    return Part(tuple(shape), tuple(pieces))


def _joined(operation: Any, state: dict[str, list[Part]]) -> dict[str, list[Part]]:
    parts = [part for each in state.values() for part in each]
    dim = operation.dim % len(parts[0].shape)
    others = {part.shape[:dim] + part.shape[dim + 1 :] for part in parts}
    if len(others) != 1:
        raise NoRecipeError
    pieces, start = [], 0
    for part in parts:
        narrow = _narrowed(dim, start, part.shape[dim])
        pieces += [Piece(piece.name, _after(narrow, piece.view)) for piece in part.pieces]
        start += part.shape[dim]
    shape = (*parts[0].shape[:dim], start, *parts[0].shape[dim + 1 :])
    return {next(iter(state)): [Part(shape, tuple(pieces))]}


def _turned(operation: Any, state: dict[str, list[Part]]) -> dict[str, list[Part]]:
    parts = [part for each in state.values() for part in each]
    if len(parts) != 1:
        raise NoRecipeError
    shape, turn = list(parts[0].shape), _transposed(operation.dim0, operation.dim1)
    first, second = operation.dim0, operation.dim1
    shape[first], shape[second] = shape[second], shape[first]
    pieces = tuple(Piece(piece.name, _after(turn, piece.view)) for piece in parts[0].pieces)
    return {next(iter(state)): [Part(tuple(shape), pieces)]}


_KNOWN = {"MergeModulelist": _stacked, "Concatenate": _joined, "Transpose": _turned}


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _after(outer: View, inner: View) -> View:
    return lambda tensor: inner(outer(tensor))


def _selected(dim: int, index: int) -> View:
    return lambda tensor: tensor.select(dim, index)


def _narrowed(dim: int, start: int, length: int) -> View:
    return lambda tensor: tensor.narrow(dim, start, length)


def _transposed(first: int, second: int) -> View:
    return lambda tensor: tensor.transpose(first, second)
