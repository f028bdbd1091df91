"""Convert checkpoint tensors by the application's own converter, and find out where each went.

The inverse of a converter is measured, not written: the same converter and the same sharding are
run on numbers that say which element of the checkpoint each one is. Whatever stacks, fuses, pads,
transposes, replicates or slices is then known element by element, for this rank. A converter that
computes (it adds one to a norm's weight, say) leaves numbers that are none of those, and its
tensors are said to be untraceable.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# Whole numbers up to 256 are exact in bfloat16, the narrowest type that a converter may cast to.
# Digits are 1 to 128: padding with zeros is none.
_RADIX = 128
# Two more digits prove the others: a number that a converter computed has wrong ones, but for one
# in 16,000. What so few elements of a parameter seem to come from is not believed.
_PROOFS = (2654435761, 40503)
_LEAST = 1e-3

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class ElementOrigin:
    """Where the elements of one parameter come from.

    ``name`` holds the number of the stored tensor for each element, int32, -1 where it is padding
    or was computed; ``place`` the element's place in that tensor, flattened, int64. Both have the
    parameter's shape. ``names`` are the stored tensors by number.
    """

    name: torch.Tensor
    place: torch.Tensor
    names: tuple[str, ...]

    @property
    def stored(self) -> list[str]:
        """The stored tensors that it has elements of."""
        return [self.names[number] for number in self.name.unique().tolist() if number >= 0]


def trace(convert: Convert, stored: Mapping[str, torch.Tensor]) -> dict[str, ElementOrigin]:
    """Return the origin of every parameter that ``convert`` makes of the stored tensors.

    ``convert`` takes tensors by stored name, and returns this rank's by parameter; it is called
    once for each digit. Tensors may have any floating type that holds whole numbers up to 128.
    """
    names = tuple(stored)
    starts, total = {}, 0
    for name, tensor in stored.items():
        starts[name] = total
        total += tensor.numel()
    digits = 1
    while _RADIX**digits < total:
        digits += 1
    made: list[dict[str, torch.Tensor]] = []
    for power in (*range(digits), *(-1 - each for each in range(len(_PROOFS)))):
        numbered = {name: _digit(starts[name], tensor, power) for name, tensor in stored.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.append(convert(numbered))
    edges = torch.tensor([starts[name] for name in names])
    return {
        parameter: _decoded([each[parameter] for each in made], total, edges, names)
        for parameter in made[0]
    }


def _digit(start: int, tensor: torch.Tensor, power: int) -> torch.Tensor:
    """Return a digit of each element's number, or a proof of it where ``power`` is negative."""
    numbers = torch.arange(start, start + tensor.numel())
    if power < 0:
        digit = _proof(numbers, _PROOFS[-1 - power])
    else:
        digit = numbers.div(_RADIX**power, rounding_mode="floor").remainder(_RADIX)
    return (digit + 1).reshape(tensor.shape).to(tensor.dtype)


def _proof(numbers: torch.Tensor, factor: int) -> torch.Tensor:
    """Return a digit for each number that its first digit never equals: a constant has no proof."""
    mixed = (numbers * factor).remainder(2**31).div(2**16, rounding_mode="floor")
    return (numbers + 1 + mixed % (_RADIX - 1)).remainder(_RADIX)


def _decoded(
    made: list[torch.Tensor], total: int, edges: torch.Tensor, names: tuple[str, ...]
) -> ElementOrigin:
    digits = torch.stack([each.to(torch.float64).nan_to_num() for each in made])
    right = ((digits == digits.round()) & (digits >= 1) & (digits <= _RADIX)).all(0)
    whole = digits.clamp(1, _RADIX).long() - 1
    powers = _RADIX ** torch.arange(len(made) - len(_PROOFS))
    numbers = (whole[: -len(_PROOFS)] * powers.view(-1, *(1,) * made[0].dim())).sum(0)
    for place, factor in enumerate(_PROOFS):
        right &= _proof(numbers, factor) == whole[place - len(_PROOFS)]
    right &= numbers < total
    name = torch.bucketize(numbers, edges, right=True) - 1
    counts = torch.bincount(name[right].reshape(-1), minlength=len(names))
    right &= (counts >= _LEAST * right.numel())[name.clamp(0, len(names) - 1)]
    nowhere = torch.full_like(numbers, -1)
    places = torch.where(right, numbers - edges[name.clamp(0, len(names) - 1)], nowhere)
    return ElementOrigin(torch.where(right, name, nowhere).to(torch.int32), places, names)


@dataclass(frozen=True)
class Gathered:
    """What parameters hold of one stored tensor: values and mask of its shape, and who holds it.

    ``doubled`` says whether two places that should hold the same element do not.
    """

    values: torch.Tensor
    mask: torch.Tensor
    parameter: str
    doubled: bool = False


def inverse(
    origins: Mapping[str, ElementOrigin],
    parameters: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Size],
) -> dict[str, Gathered]:
    """Return what parameters hold of each stored tensor, by its name.

    ``parameters`` are the rank's own, of any floating dtype; ``shapes`` those of stored tensors.
    """
    found: dict[str, Gathered] = {}
    for parameter, origin in origins.items():
        held = parameters[parameter].detach().reshape(-1)
        numbers, places = origin.name.reshape(-1), origin.place.reshape(-1)
        for number in numbers.unique().tolist():
            if number < 0:
                continue
            name = origin.names[number]
            here = (numbers == number).nonzero().flatten()
            before = found.get(name)
            size = shapes[name].numel()
            values = held.new_zeros(size) if before is None else before.values.reshape(-1)
            mask = (
                torch.zeros(size, dtype=torch.bool) if before is None else before.mask.reshape(-1)
            )
            at = places[here]
            values[at] = held[here].to(values.dtype)
            mask[at] = True
            doubled = not torch.equal(values[at], held[here].to(values.dtype))
            doubled |= before is not None and before.doubled
            owner = parameter if before is None else before.parameter
            found[name] = Gathered(
                values.reshape(shapes[name]), mask.reshape(shapes[name]), owner, doubled
            )
    return found
