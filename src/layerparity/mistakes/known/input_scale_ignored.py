"""Activations are packed with a scale of 1: the one that was stored for them was not read."""

from __future__ import annotations

from torch import nn

from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.rounded_inputs import Inputs, rounding_inputs
from layerparity.numbers.activations import Activations


def _is_stored(activations: Activations) -> bool:
    return bool(activations.fixed)


def _ignored(inputs: Inputs) -> Inputs:
    return {n: each._replace(fixed=1.0) if each.fixed else each for n, each in inputs.items()}


def _plant(block: nn.Module, surgery: Surgery) -> None:
    surgery.wrap(block, rounding_inputs(block, surgery, _ignored))


FAULT = Fault(
    "input_scale_ignored",
    "the stored scales of activations were not read: 1 was taken for each",
    component="self_attn.q_proj",
    cause="precision",
    of_inputs=_is_stored,
    coarse=True,
    plant=_plant,
)
