"""Two neighbouring heads stand in each other's place where heads are put together again."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from layerparity.mistakes.block import find, head_dim
from layerparity.mistakes.fault import Fault, Plant, Surgery
from layerparity.mistakes.parts import exchange

_PATH = "self_attn.o_proj"
# Of more heads, nobody would wait for all.
_MOST = 64


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the last projection of attention with neighbouring heads exchanged, and moved on."""
    weight, size = find(block, f"{_PATH}.weight"), head_dim(block)
    if weight is None or not size or weight.dim() != 2 or weight.shape[1] % size:
        return
    count = weight.shape[1] // size
    for first in range(count - 1 if count <= _MOST else 0):
        yield _exchanged(first, size)
    for by in (1, -1):
        yield _moved(by, size)


def _exchanged(first: int, size: int) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        columns = find(block, f"{_PATH}.weight").data
        start, end = first * size, (first + 1) * size
        exchange(columns.narrow(1, start, size), columns.narrow(1, end, size))

    words = f"heads {first} and {first + 1} stand in each other's place at {_PATH}"
    return _fault(f"heads {first} and {first + 1} exchanged", words, plant)


def _moved(by: int, size: int) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        columns = find(block, f"{_PATH}.weight").data
        columns.copy_(columns.roll(by * size, 1))

    return _fault(f"heads moved by {by:+d}", f"all heads are moved on by one at {_PATH}", plant)


def _fault(name: str, words: str, plant: Plant) -> Fault:
    return Fault(name, words, _PATH, "heads_exchanged", by_weights=True, plant=plant)


TRIES = tries
