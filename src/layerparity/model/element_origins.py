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
from dataclasses import dataclass, replace

import torch

# Whole numbers up to 256 are exact in bfloat16, the narrowest type that a converter may cast to.
# Digits are 1 to 128: padding with zeros is none.
_RADIX = 128
# Two more digits prove the others: a number that a converter computed has wrong ones, but for one
# in 16,000. What so few elements of a parameter seem to come from is not believed.
_PROOFS = (2654435761, 40503)
_LEAST = 1e-3
# Elements that are worked on at once.
_CHUNK = 1 << 20

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class ElementOrigin:
    """Where the elements of one parameter come from.

    ``name`` holds the number of the stored tensor for each element, int32, -1 where it is padding
    or was computed; ``place`` the element's place in that tensor, flattened, -1 likewise, int32
    (int64 where a stage has 2^31 elements). Both have the parameter's shape. ``names`` are the
    stored tensors by number, ``held`` the numbers of those that it has elements of.
    """

    name: torch.Tensor
    place: torch.Tensor
    names: tuple[str, ...]
    held: tuple[int, ...]

    @property
    def stored(self) -> list[str]:
        """The stored tensors that it has elements of."""
        return [self.names[number] for number in self.held]


def trace(convert: Convert, stored: Mapping[str, torch.Tensor]) -> dict[str, ElementOrigin]:
    """Return the origin of every parameter that ``convert`` makes of the stored tensors.

    ``convert`` takes tensors by stored name, and returns this rank's by parameter; it is called
    once for each digit, with tensors that it may change. Of those in ``stored`` only shape and type
    count, any floating one that holds whole numbers up to 128; they may be on the meta device.
    """
    names = tuple(stored)
    starts, total = {}, 0
    for name, tensor in stored.items():
        starts[name] = total
        total += tensor.numel()
    digits = 1
    while _RADIX**digits < total:
        digits += 1
    made: dict[str, list[torch.Tensor]] = {}
    for power in (*range(digits), *(-1 - each for each in range(len(_PROOFS)))):
        numbered = {name: _digit(starts[name], tensor, power) for name, tensor in stored.items()}
        with warnings.catch_warnings():
            # NxD warns of every tensor that it drops, and would once for each digit.
            warnings.simplefilter("ignore")
            converted = convert(numbered)
        for parameter in list(converted):
            # Let go one by one: what is converted is as large as the layer.
            made.setdefault(parameter, []).append(_seen(converted.pop(parameter)))
    edges = torch.tensor([starts[name] for name in names])
    return {
        parameter: _decoded(made.pop(parameter), total, edges, names) for parameter in list(made)
    }


def _seen(tensor: torch.Tensor) -> torch.Tensor:
    """Return a converted tensor's digits, uint8: 1 to 128, and 0 for what is none."""
    seen = torch.empty(tensor.numel(), dtype=torch.uint8)
    for start in range(0, seen.numel(), _CHUNK):
        here = slice(start, start + _CHUNK)
        part = tensor.reshape(-1)[here].float()
        right = (part == part.round()) & (part >= 1) & (part <= _RADIX)
        seen[here] = part.where(right, torch.zeros(())).to(torch.uint8)
    return seen.reshape(tensor.shape)


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
    """Return the origin that a parameter's digits say, uint8 each, in the parameter's shape."""
    name = torch.empty(made[0].shape, dtype=torch.int32)
    narrow = total < 2**31
    place = torch.empty(made[0].shape, dtype=torch.int32 if narrow else torch.int64)
    flat = [each.reshape(-1) for each in made]
    counts = torch.zeros(len(names), dtype=torch.int64)
    # A real layer has billions of elements: their numbers are put together a few at a time.
    for start in range(0, name.numel(), _CHUNK):
        here = slice(start, start + _CHUNK)
        digits = torch.stack([each[here].long() for each in flat]) - 1
        powers = _RADIX ** torch.arange(len(made) - len(_PROOFS))
        numbers = (digits[: -len(_PROOFS)] * powers[:, None]).sum(0)
        right = (digits >= 0).all(0) & (numbers < total)
        for proof, factor in enumerate(_PROOFS):
            right &= _proof(numbers, factor) == digits[proof - len(_PROOFS)]
        owner = (torch.bucketize(numbers, edges, right=True) - 1).clamp(0, len(names) - 1)
        counts += torch.bincount(owner[right], minlength=len(names))
        name.view(-1)[here] = torch.where(right, owner, -1).int()
        place.view(-1)[here] = torch.where(right, numbers - edges[owner], -1).to(place.dtype)
    enough = counts >= max(1, _LEAST * name.numel())
    for few in (counts.gt(0) & ~enough).nonzero().flatten().tolist():
        # Places first, for the names say which they are.
        place[name == few], name[name == few] = -1, -1
    return ElementOrigin(name, place, names, tuple(enough.nonzero().flatten().tolist()))


@dataclass(frozen=True)
class Gathered:
    """What parameters hold of one stored tensor: values and mask of its shape, and who holds it.

    ``doubled`` says whether two places that should hold the same element do not.
    """

    values: torch.Tensor
    mask: torch.Tensor
    parameter: str
    doubled: bool = False

    def take(self, places: torch.Tensor, held: torch.Tensor) -> bool:
        """Take values for places, int64 [n]; say whether what a place has already is the same."""
        values, mask = self.values.view(-1), self.mask.view(-1)
        fresh = held.to(values.dtype)
        known = mask[places]
        same = torch.equal(values[places][known], fresh[known])
        values[places], mask[places] = fresh, True
        # Among the places themselves one may come twice, and its last value has stayed.
        return same and torch.equal(values[places], fresh)


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
        # Piece by piece: what is stacked has few stored tensors in each.
        for start in range(0, len(held), _CHUNK):
            here = slice(start, start + _CHUNK)
            for number in numbers[here].unique().tolist():
                if number < 0:
                    continue
                mine = numbers[here] == number
                name = origin.names[number]
                if name not in found:
                    blank = held.new_zeros(shapes[name])
                    found[name] = Gathered(
                        blank, torch.zeros_like(blank, dtype=torch.bool), parameter
                    )
                same = found[name].take(places[here][mine].long(), held[here][mine])
                if not same and not found[name].doubled:
                    found[name] = replace(found[name], doubled=True)
    return found
