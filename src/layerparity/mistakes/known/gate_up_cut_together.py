"""Gate and up, stored as one, are cut as one: each rank halves its slice for a gate and an up.

Of two ranks the first then has the gate alone, the second nothing but up. All weights are there.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from layerparity.mistakes.block import find, lacking
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.known.gate_up_swapped import DENSE
from layerparity.mistakes.parts import halves
from layerparity.mistakes.ranks import DEGREES

_STACKED = "mlp.gate_up_proj.weight"


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the ranks that a dense block's gate and up can be cut for."""
    pair = _pair(block)
    width = 0 if pair is None else len(pair[0])
    yield from (_cut(degree) for degree in DEGREES if width and width % degree == 0)


def _pair(block: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the weights of gate and up, [width, channel] each, as views; None without any."""
    stacked = find(block, _STACKED)
    if stacked is not None:
        return halves(None, stacked.data, outputs=0)
    if lacking(block, *DENSE):
        return None
    gate, up = (find(block, path).data for path in DENSE)
    return gate, up


def _cut(degree: int) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        pair = _pair(block)
        assert pair is not None, "tried in blocks that have them"
        # Each rank's slice of the stack, and the halves that it takes it for.
        pieces = torch.cat(pair).chunk(2 * degree)
        for half, own in zip(pair, (pieces[0::2], pieces[1::2]), strict=True):
            half.copy_(torch.cat(own))

    words = (
        f"gate and up, stored as one, were cut as one among {degree} ranks: each takes the halves "
        "of its slice for its gate and its up"
    )
    name = f"gate and up cut together among {degree}"
    return Fault(name, words, "mlp", "gate_up_cut_together", plant=plant, degree=degree)


TRIES = tries
