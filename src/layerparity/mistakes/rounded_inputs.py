"""What is multiplied by packed weights is rounded, as a checkpoint says it or otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

from torch import nn

from layerparity.mistakes.block import config_of
from layerparity.mistakes.fault import Surgery
from layerparity.numbers.activations import Activations
from layerparity.numbers.arithmetic import Operation
from layerparity.numbers.clean import implementations
from layerparity.numbers.operands import ACTIVATIONS, Operands

Inputs = Mapping[int, Activations]


def rounding_inputs(
    block: nn.Module, surgery: Surgery, as_read: Callable[[Inputs], Inputs]
) -> Callable[[Operation], Operation]:
    """Return what makes a block's forward round the inputs of its weights as they are ``as_read``.

    Which weights these are is asked as it runs: a device may have taken others in their place.
    """

    def around(exact: Operation) -> Operation:
        def forward(*args: object, **named: object) -> object:
            config, inputs = config_of(block), as_read(surgery.inputs())
            # One expert after the other: what is gathered from all is no weight of the block.
            eager = nullcontext() if config is None else implementations(config, None, "eager")
            with eager, Operands(ACTIVATIONS, inputs):
                return exact(*args, **named)

        return forward

    return around
