"""Activations are packed with a scale of 1: the one that was stored for them was not read."""

from __future__ import annotations

from torch import nn

from layerparity.mistakes.fault import Fault, Surgery
from layerparity.numbers.activations import Activations
from layerparity.numbers.arithmetic import Operation
from layerparity.numbers.operands import ACTIVATIONS, Operands


def _is_stored(activations: Activations) -> bool:
    return bool(activations.fixed)


def _plant(block: nn.Module, surgery: Surgery) -> None:
    inputs = {
        weight: each._replace(fixed=1.0) if each.fixed else each
        for weight, each in surgery.inputs().items()
    }

    def around(exact: Operation) -> Operation:
        def forward(*args: object, **named: object) -> object:
            with Operands(ACTIVATIONS, inputs):
                return exact(*args, **named)

        return forward

    surgery.wrap(block, around)


FAULT = Fault(
    "input_scale_ignored",
    "the stored scales of activations were not read: 1 was taken for each",
    component="self_attn.q_proj",
    cause="precision",
    coarse=True,
    plant=_plant,
    of_inputs=_is_stored,
)
