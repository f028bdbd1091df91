"""Refuse numbers that were finite as they were stored and would be Inf in the new type."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from layerparity.checkpoint.slices import TensorSlice
from layerparity.ground.errors import UserError
from layerparity.model.filling import DTYPES

if TYPE_CHECKING:
    from layerparity.model.filling import Filler
    from layerparity.model.header import Stored

# Wider ranges in their order; float16 has the smallest of all.
_WIDER = (torch.bfloat16, torch.float32, torch.float64)


def refuse_overflow(part: TensorSlice, values: torch.Tensor, filler: Filler) -> None:
    """Raise UserError where ``values``, a slice in its new type, has an Inf that was no Inf before.

    The stored numbers are read a second time only where there is an Inf or NaN. A scale that is
    Inf, and an Inf that was stored as one, stay what they are.
    """
    # One pass; isinf() takes ten times as long and a mask.
    if not values.numel() or all(math.isfinite(float(end)) for end in torch.aminmax(values)):
        return
    exact = _exact(part, values.isinf(), filler)
    lost = exact[exact.isfinite()]
    if lost.numel():
        raise _refusal(part, values.dtype, lost.abs().max())


def _exact(part: TensorSlice, where: torch.Tensor, filler: Filler) -> torch.Tensor:
    """Return the values at ``where`` as float64, FP8 numbers times their scales without loss."""
    stored = _as_stored(part.stored, filler)
    if part.scales is None:
        return stored[where].double()
    rows, columns = part.stored.shape
    factors = _as_stored(part.scales, filler)
    wide = factors.repeat_interleave(part.block[0], 0)[:rows]
    wide = wide.repeat_interleave(part.block[1], 1)[:, :columns]
    # torch cannot pick out FP8 numbers.
    return stored.float()[where].double() * wide[where].double()


def _as_stored(stored: Stored, filler: Filler) -> torch.Tensor:
    into = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    filler.fill(stored, into)
    return into


def _refusal(part: TensorSlice, target: torch.dtype, worst: torch.Tensor) -> UserError:
    name = part.stored.name
    # FP8 numbers are multiplied in float32, whatever they are written as.
    wider = _WIDER if part.scales is None else _WIDER[:-1]
    fits = next((each for each in wider if worst.to(each).isfinite()), None)
    beyond = f"holds values beyond {_called(target)}'s {torch.finfo(target).max:g}"
    if fits is None:
        return UserError(
            f"{name} {beyond} once its scales are applied: take weights and scales from one place."
        )
    return UserError(f"{name} {beyond}: use dtype={_called(fits)}.")


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
