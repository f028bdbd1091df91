"""A packing format: which stored tensors are one weight, and how they are to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from layerparity.model.header import Stored
from layerparity.model.packed import NUMBERS, PackingLayout

Shape = tuple[int, ...]
# The types that scales of a weight are read in.
SCALE_TYPES = ("F32", "BF16", "F16")


class UnfitError(Exception):
    """Parts that are no weight together: ``what`` is the audit's word for it."""

    def __init__(self, what: str, text: str, part: Stored) -> None:
        super().__init__(text)
        self.what, self.text, self.part = what, text, part


@dataclass(frozen=True)
class Quantization:
    """What config.json says of its quantization: the method, and its own keys."""

    method: str
    keys: Mapping[str, object]

    def weights(self) -> Iterator[Mapping[str, object]]:
        """Yield what each group of compressed-tensors' modules says of its weights."""
        groups = self.keys.get("config_groups")
        for group in groups.values() if isinstance(groups, Mapping) else ():
            said = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(said, Mapping):
                yield said


class Laid(NamedTuple):
    """How a weight lies: what its numbers are, the shape of its values, and where they are."""

    kind: str
    shape: Shape
    layout: PackingLayout


def check_part(parts: Mapping[str, Stored], role: str, shape: Shape, *dtypes: str) -> None:
    """Raise UnfitError where a part that is there has another shape or type than it should have."""
    part = parts.get(role)
    if part is None:
        return
    if part.dtype not in dtypes:
        raise UnfitError("scale_type", f"{part.name} is stored as {part.dtype}", part)
    if part.shape != shape:
        text = f"{part.name} has the shape {list(part.shape)}, and {list(shape)} is due"
        raise UnfitError("scale_shape", text, part)


def refuse_uneven(scales: Stored, columns: int) -> None:
    """Raise UnfitError where so many columns are no whole groups of scales [group, row]."""
    if not scales.shape[0] or columns % scales.shape[0]:
        text = f"{scales.name} has {scales.shape[0]} groups for {columns} columns"
        raise UnfitError("scale_shape", text, scales)


@dataclass(frozen=True)
class Format:
    """One way of packing a weight.

    Of a weight ``x.weight`` the numbers are ``x.weight`` and one of ``suffixes``, in one of
    ``dtypes``; a part of another role is the name and one of its suffixes in ``parts``. With
    ``stem`` all of them have that instead of the name's last word. ``needed`` are the roles without
    which there are only numbers. ``methods`` are the quant_methods that pack so, empty where the
    tensors themselves say it. ``lay`` says how a weight of these parts lies; it raises UnfitError.
    ``unused`` may stand beside a weight, and says nothing of its values.
    """

    dtypes: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    needed: tuple[str, ...]
    lay: Callable[[Mapping[str, Stored], Quantization], Laid]
    suffixes: tuple[str, ...] = ("",)
    methods: tuple[str, ...] = ()
    stem: str = ""
    unused: tuple[str, ...] = ()

    def weight_of(self, stored: Stored, settings: Quantization) -> str | None:
        """Return the name of the weight whose numbers a stored tensor is, or None."""
        if stored.dtype not in self.dtypes or (
            self.methods and settings.method not in self.methods
        ):
            return None
        for suffix in self.suffixes:
            if stored.name.endswith(suffix):
                return stored.name.removesuffix(suffix) + self.stem
        return None

    def names(self, weight: str, role: str = NUMBERS) -> list[str]:
        """Return the names that a part of a weight may have, the usual one first."""
        suffixes = self.suffixes if role == NUMBERS else self.parts[role]
        return [weight.removesuffix(self.stem) + suffix for suffix in suffixes]

    def parts_of(self, weight: str, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return the parts of a weight that are there, by role."""
        found = {}
        for role in (NUMBERS, *self.parts):
            part = next((tensors[n] for n in self.names(weight, role) if n in tensors), None)
            if part is not None:
                found[role] = part
        return found
