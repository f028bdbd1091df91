"""Give a converter what an FP8 checkpoint stores: numbers of eight bits beside their scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from layerparity.ground.errors import UserError
from layerparity.model.filling import Filler
from layerparity.model.number_types import DTYPES
from layerparity.model.packed import NUMBERS, SCALES, PackedWeight
from layerparity.numbers.pieces import FP8

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Fp8Weights:
    """FP8 weights as they are stored, by name, and their scales, by the scales' own names.

    ``values`` are the products, in the run's dtype: a product has no stored type.
    """

    numbers: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype) -> Fp8Weights:
        """Read those of ``names`` that are stored in FP8."""
        filler = Filler(checkpoint.files, hashing=False)
        numbers, scales, values = dict[str, torch.Tensor](), dict[str, torch.Tensor](), {}
        for name in names:
            checkpoint.unpacked.refuse(name)
            weight = checkpoint.tensors[name]
            if not isinstance(weight, PackedWeight):
                continue
            values[name] = checkpoint.value(name, dtype)
            if weight.dtype == FP8:
                # As they are stored, for a converter that multiplies by the scales itself.
                for role, into in ((NUMBERS, numbers), (SCALES, scales)):
                    part = weight.parts[role]
                    into[part.name] = torch.empty(part.shape, dtype=DTYPES[part.dtype])
                    filler.fill(part, into[part.name])
        return cls(numbers, scales, values)

    def wide(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors by stored name with the products for those that are stored in FP8."""
        # Clones, for a converter may change what it is given.
        return values | {name: each.clone() for name, each in self.values.items()}

    def blank(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        """Return a tensor on the meta device in the shape and type that a converter is given."""
        known = self.values.get(name)
        dtype = checkpoint.held_as(name) if known is None else known.dtype
        return torch.empty(checkpoint.tensors[name].shape, dtype=dtype, device="meta")

    @property
    def ones(self) -> dict[str, torch.Tensor]:
        """Return scales that change nothing."""
        return {name: torch.ones_like(each) for name, each in self.scales.items()}


def refuse_fp8_modules(parameters: dict[str, torch.Tensor]) -> None:
    """Raise UserError where modules hold numbers of eight bits: nobody knows their scales here."""
    eight = DTYPES[FP8]
    held = next((name for name, each in parameters.items() if each.dtype == eight), None)
    if held is not None:
        raise UserError(
            f"{held} is held in FP8, whose values cannot be compared with the checkpoint's",
            "run without quantized=true in port.neuron_config.",
        )
