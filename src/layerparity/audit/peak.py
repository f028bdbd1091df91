"""Peak: the memory of a naive conversion, and where it is reached; beside it, that of streaming.

The naive way reads the whole state dict, widens FP8 weights to bfloat16, and copies the experts
into one buffer for each stacked weight while it still holds what they came from. With the buffers
in float32 that is the mistake by which a 457 GB model wants more than a terabyte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from layerparity.audit.architecture import Fit
from layerparity.models import fp8
from layerparity.models.header import Stored

ITEM_BYTES = {"bf16": 2, "fp32": 4}
_BF16 = 2


@dataclass(frozen=True)
class Peak:
    """Bytes held at the worst moment of a naive conversion with buffers of one type.

    ``sources`` is the state dict, ``stacked`` all buffers, ``weight`` the stacked weight that is
    being filled then (empty: none is stacked); ``largest`` the largest buffer and ``buffer`` its
    bytes. ``streaming`` is what the largest two stages in a row take, which is enough: one that
    computes and one that is being read.
    """

    bytes: int
    sources: int
    stacked: int
    weight: str
    largest: str
    buffer: int
    streaming: int


def peaks(fitted: Fit, tensors: Mapping[str, Stored]) -> dict[str, Peak]:
    """Return the peak by type of the buffers; empty where the architecture is not known."""
    if not fitted.weights:
        return {}
    stacks = [weight for weight in fitted.weights if weight.pieces > 1]
    sources = _sources(tensors.values())
    in_a_row = max((left + right for left, right in pairwise(fitted.stages.values())), default=0)
    found = {}
    for name, item in ITEM_BYTES.items():
        stacked = sum(weight.numbers for weight in stacks) * item
        largest = max(stacks, key=lambda weight: weight.numbers, default=None)
        found[name] = Peak(
            bytes=sources + stacked,
            sources=sources,
            stacked=stacked,
            weight=stacks[-1].name if stacks else "",
            largest=largest.name if largest else "",
            buffer=largest.numbers * item if largest else 0,
            streaming=in_a_row * item,
        )
    return found


def _sources(tensors: Iterable[Stored]) -> int:
    """Return the bytes of the state dict: as stored, FP8 in bfloat16 and without its scales."""
    weights = (each for each in tensors if not fp8.is_scale(each.name))
    return sum(
        math.prod(each.shape) * _BF16 if each.dtype in fp8.STORED else each.bytes
        for each in weights
    )
